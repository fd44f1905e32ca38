"""What block size does to the hit rate of the prefix cache, on a Mooncake trace.

    python -m experiments.costs.prefix_hit_rate --trace=conversation_trace.jsonl --quick
    python -m experiments.costs.prefix_hit_rate --trace=conversation_trace.jsonl
    python -m experiments.costs.prefix_hit_rate --trace=conversation_trace.jsonl --pool_tokens=3000000

Only full blocks are shared, so what two prompts have in common is rounded down to the block size:
15 shared tokens are three blocks of 4 and none of 16. The first table shows this case. For the
second, the memory manager sees the trace's prompts in the order of their arrival, each computed
before the next comes; outputs, whose tokens the trace does not tell, are not kept.

The trace tells what prompts share in whole blocks of 512 tokens. So smaller blocks can hardly find
more here than those of 512, whatever the prompts themselves would allow. What it shows is what
larger blocks lose, and what pools lose that are too small to keep what will be asked again. (In
such a pool blocks of 512 find a little more: they do not keep the ends of prompts, of less than a
block, which nobody asks for again.)

Expect a minute with --quick (the first 1,000 requests) and ten without on a CPU, with up to 4 GB
of memory. --out_dir gets results.json, results.csv and prefix_hit_rate.png.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import matplotlib.pyplot as plt
from absl import flags
from tqdm import tqdm

from experiments.lib import reporting
from experiments.lib.reporting import preset
from paged_jax.memory.block_manager import BlockManager
from paged_jax.workloads import MooncakeRow, read_mooncake
from paged_jax.workloads.mooncake import HASH_BLOCK_TOKENS

TEXTBOOK_SHARED_TOKENS = 15
TEXTBOOK_PROMPT_TOKENS = 32


class Prompt(NamedTuple):
    """Numbers, each of which stands for `unit` tokens; the last may stand for fewer."""

    numbers: Sequence[int]
    num_whole: int  # how many of them stand for `unit` tokens

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> "Prompt":
        """With a number for each token."""
        return cls(token_ids, len(token_ids))


@dataclass(frozen=True, slots=True)
class Replay:
    """Prompts, one after the other: what was found of each, and what the cache counted."""

    hit_tokens: list[int]
    evictions: int
    too_long: int  # prompts that the pool can never hold


def replay(
    prompts: Iterable[Prompt],
    num_blocks: int,
    block_size: int,
    *,
    unit: int = 1,
    on_prompt: Callable[[], object] = lambda: None,
) -> Replay:
    """Admit, compute and end each prompt before the next.

    So a prompt finds what those before it left, unless it was evicted; outputs are not kept. Blocks
    are of `block_size` tokens, a multiple of `unit`.
    """
    memory = BlockManager(1 + num_blocks, block_size // unit)
    hit_tokens: list[int] = []
    too_long = 0
    for seq_id, (numbers, num_whole) in enumerate(prompts):
        found = memory.allocate(seq_id, numbers, max_num_tokens=len(numbers))
        if found is None:
            too_long += 1
        else:
            memory.commit_full_blocks(seq_id, numbers, num_whole)
            memory.free(seq_id)
        hit_tokens.append(unit * (found or 0))
        on_prompt()
    return Replay(hit_tokens, memory.stats.evictions, too_long)


def textbook_hits(block_size: int) -> int:
    """Tokens that the second of two prompts finds, which share their first 15."""
    count = TEXTBOOK_PROMPT_TOKENS
    first = list(range(count))
    second = first[:TEXTBOOK_SHARED_TOKENS] + list(range(count, 2 * count - TEXTBOOK_SHARED_TOKENS))
    return replay([Prompt.of(first), Prompt.of(second)], 2 * count, block_size).hit_tokens[1]


def replay_trace(
    rows: Sequence[MooncakeRow],
    block_size: int,
    pool_tokens: int | None,
    *,
    on_prompt: Callable[[], object] = lambda: None,
) -> Replay:
    """Replay a trace's prompts in a pool of so many slots; None: as many as can be used.

    Blocks begin, and prompts part, at multiples of `unit` tokens only. So the manager is given one
    number for each `unit` tokens, and blocks of so many times fewer: it finds the same with less
    time and memory.
    """
    unit = gcd(block_size, HASH_BLOCK_TOKENS)
    num_blocks = sum(-(-row.num_prompt_tokens // block_size) for row in rows)
    if pool_tokens is not None:
        num_blocks = min(num_blocks, pool_tokens // block_size)
    prompts = prompts_of(rows, unit)
    return replay(prompts, num_blocks, block_size, unit=unit, on_prompt=on_prompt)


def prompts_of(rows: Iterable[MooncakeRow], unit: int) -> Iterator[Prompt]:
    """Prompts with one number for each `unit` tokens, which `HASH_BLOCK_TOKENS` is a multiple of.

    Numbers are equal where the trace says that tokens are.
    """
    per_hash = HASH_BLOCK_TOKENS // unit
    for row in rows:
        numbers = [hash_id * per_hash + i for hash_id in row.hash_ids for i in range(per_hash)]
        num_tokens = row.num_prompt_tokens
        yield Prompt(numbers[: -(-num_tokens // unit)], num_tokens // unit)


_QUICK = flags.DEFINE_bool("quick", False, "The beginning of the trace only.")
_TRACE = flags.DEFINE_string("trace", None, "A Mooncake trace (JSONL).")
_NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests",
    None,
    "So many of the trace's first requests; default: 0, all of them, or 1000 with --quick.",
    lower_bound=0,
)
_BLOCK_SIZE = flags.DEFINE_list(
    "block_size", ["16", "128", "512", "1024", "2048", "4096"], "Block sizes, in tokens."
)
_POOL_TOKENS = flags.DEFINE_list(
    "pool_tokens", ["0", "10000000", "1000000"], "Slots of the pool; 0: as many as can be used."
)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/prefix_hit_rate", "Where the results go.")

TEXTBOOK_BLOCK_SIZES = (1, 2, 4, 8, 16)


class Case(NamedTuple):
    """One row of the table."""

    block_size: int
    pool_tokens: int
    hit_tokens: int
    hit_percent: float  # of all prompt tokens
    requests_percent: float  # of the requests, those that found anything
    evictions: int
    too_long: int  # requests that the pool can never hold


def run_case(rows: Sequence[MooncakeRow], block_size: int, pool_tokens: int) -> Case:
    description = f"blocks of {block_size}, {pool_tokens or 'unlimited'} slots"
    with tqdm(total=len(rows), desc=description, unit="request", leave=False) as bar:
        run = replay_trace(rows, block_size, pool_tokens or None, on_prompt=bar.update)
    hit_tokens = sum(run.hit_tokens)
    return Case(
        block_size,
        pool_tokens,
        hit_tokens,
        hit_percent=100 * hit_tokens / sum(row.num_prompt_tokens for row in rows),
        requests_percent=100 * sum(map(bool, run.hit_tokens)) / len(rows),
        evictions=run.evictions,
        too_long=run.too_long,
    )


def plot(cases: Sequence[Case], path: str) -> None:
    """Hit rate against block size, a line for each pool."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for pool_tokens in dict.fromkeys(case.pool_tokens for case in cases):
        chosen = [case for case in cases if case.pool_tokens == pool_tokens]
        label = f"{pool_tokens:,} slots" if pool_tokens else "unlimited"
        axes.plot(
            [c.block_size for c in chosen], [c.hit_percent for c in chosen], "o-", label=label
        )
    sizes = sorted({case.block_size for case in cases})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set(xlabel="block size (tokens)", ylabel="prompt tokens found in the cache (%)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    block_sizes = reporting.integers(_BLOCK_SIZE, 1)
    pools = reporting.integers(_POOL_TOKENS, 0)
    if _TRACE.value is None:
        raise ValueError("--trace: the path of a Mooncake trace (JSONL) is needed")
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    rows = read_mooncake(_TRACE.value)
    num_requests = preset(_NUM_REQUESTS, _QUICK.value, quick=1000, full=0)
    rows = rows[: num_requests or None]
    prompt_tokens = sum(row.num_prompt_tokens for row in rows)

    textbook = [
        {"block_size": size, "shared_tokens": TEXTBOOK_SHARED_TOKENS, "hits": textbook_hits(size)}
        for size in TEXTBOOK_BLOCK_SIZES
    ]
    reporting.print_table(
        "Two prompts that share their first 15 tokens",
        ("block size", "tokens found", "blocks found"),
        [(row["block_size"], row["hits"], row["hits"] // row["block_size"]) for row in textbook],
    )
    cases = [run_case(rows, size, pool) for pool in pools for size in block_sizes]
    reporting.report_cases(
        f"Prefix cache on {len(rows):,} requests with {prompt_tokens:,} prompt tokens",
        [case._asdict() for case in cases],
        out_dir,
        _QUICK,
        textbook=textbook,
        requests=len(rows),
        prompt_tokens=prompt_tokens,
    )
    plot(cases, str(out_dir / "prefix_hit_rate.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
