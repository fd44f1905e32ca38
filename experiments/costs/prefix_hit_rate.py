"""What block size does to the hit rate of the prefix cache, on a Mooncake trace.

    python -m experiments.costs.prefix_hit_rate --trace=conversation_trace.jsonl --quick
    python -m experiments.costs.prefix_hit_rate --trace=conversation_trace.jsonl
    python -m experiments.costs.prefix_hit_rate --trace=conversation_trace.jsonl --pool_tokens=0

Only full blocks are shared, so the tokens that two prompts share are rounded down to the block
size: 15 shared tokens are three blocks of 4 and none of 16, as the first table shows. For the
second, the memory manager sees the trace's prompts in the order of their arrival, each computed
before the next comes. Outputs are not kept, as the trace does not tell their tokens.

The trace tells only whether prompts share whole blocks of 512 tokens, so smaller blocks can hardly
find more. In a small pool blocks of 512 find a little more: they do not keep the end of a prompt
that fills less than a block, which no later prompt asks for.

Expect a minute with --quick and ten without on a CPU, with up to 4 GB of memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import gcd
from typing import Any, NamedTuple

from experiments.lib import Options, figures, grid, option, print_rows, report, run
from experiments.lib.claims import Claim, Results
from paged_jax.memory.block_manager import BlockManager
from paged_jax.workloads import MooncakeRow, read_mooncake

POOLS = (0, 10_000_000, 1_000_000)


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    trace: str = option(None, "The path of a Mooncake trace (JSONL).")
    num_requests: int = option(0, "The trace's first requests; 0: all.", quick=1000, least=0)
    block_size: tuple[int, ...] = option((16, 128, 512, 1024, 2048, 4096), "Block sizes.", least=1)
    pool_tokens: tuple[int, ...] = option(POOLS, "Slots of the pool; 0: unlimited.", least=0)


TEXTBOOK_SHARED_TOKENS = 15
TEXTBOOK_PROMPT_TOKENS = 32
TEXTBOOK_BLOCK_SIZES = (1, 2, 4, 8, 16)


class Prompt(NamedTuple):
    """Numbers, each of which stands for `unit` tokens; the last may stand for fewer."""

    numbers: Sequence[int]
    num_whole: int  # how many of them stand for `unit` tokens

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> "Prompt":
        """With a number for each token."""
        return cls(token_ids, len(token_ids))


class Replay(NamedTuple):
    """The tokens that each prompt found in the cache, and the cache's counts."""

    hit_tokens: list[int]
    evictions: int
    too_long: int  # prompts that the pool can never hold


def replay(prompts: Iterable[Prompt], num_blocks: int, block_size: int, *, unit: int = 1) -> Replay:
    """Admit, compute and end each prompt before the next.

    So a prompt finds the blocks of earlier prompts that were not evicted; outputs are not kept. A
    block has `block_size` tokens, a multiple of `unit`.
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
    return Replay(hit_tokens, memory.stats.evictions, too_long)


def textbook_hits(block_size: int) -> int:
    """Tokens that the second of two prompts finds, which share their first 15."""
    count = TEXTBOOK_PROMPT_TOKENS
    first = list(range(count))
    second = first[:TEXTBOOK_SHARED_TOKENS] + list(range(count, 2 * count - TEXTBOOK_SHARED_TOKENS))
    return replay([Prompt.of(first), Prompt.of(second)], 2 * count, block_size).hit_tokens[1]


def replay_trace(rows: Sequence[MooncakeRow], block_size: int, pool_tokens: int | None) -> Replay:
    """Replay a trace's prompts in a pool of so many slots; None: as many as can be used.

    Blocks begin, and prompts part, at multiples of `unit` tokens only. So the manager is given one
    number for each `unit` tokens, equal where the trace says that tokens are, and its blocks have
    so many times fewer slots: it finds the same with less time and memory.
    """
    hash_block_tokens = rows[0].block_tokens
    unit = gcd(block_size, hash_block_tokens)
    num_blocks = sum(-(-row.num_prompt_tokens // block_size) for row in rows)
    if pool_tokens is not None:
        num_blocks = min(num_blocks, pool_tokens // block_size)
    per_hash = hash_block_tokens // unit

    def prompt_of(row: MooncakeRow) -> Prompt:
        numbers = [hash_id * per_hash + i for hash_id in row.hash_ids for i in range(per_hash)]
        num_tokens = row.num_prompt_tokens
        return Prompt(numbers[: -(-num_tokens // unit)], num_tokens // unit)

    return replay(map(prompt_of, rows), num_blocks, block_size, unit=unit)


@cache
def read(config: Config) -> tuple[list[MooncakeRow], list[str]]:
    """The requests to replay, and a note on the rows of the trace that were skipped."""
    rows, notes = read_mooncake(config.trace)
    return rows[: config.num_requests or None], notes


def measure(point: tuple[int, int], config: Config) -> dict[str, int | float]:
    """Replay the trace with a (pool, block size)."""
    pool_tokens, block_size = point
    rows, _ = read(config)
    run = replay_trace(rows, block_size, pool_tokens or None)
    hit_tokens = sum(run.hit_tokens)
    return {
        "block_size": block_size,
        "pool_tokens": pool_tokens,
        "hit_tokens": hit_tokens,
        "hit_percent": 100 * hit_tokens / sum(row.num_prompt_tokens for row in rows),
        # Requests that found anything, of all.
        "requests_percent": 100 * sum(map(bool, run.hit_tokens)) / len(rows),
        "evictions": run.evictions,
        "too_long": run.too_long,
    }


def pool_label(row: dict[str, int]) -> str:
    return f"{row['pool_tokens']:,} slots" if row["pool_tokens"] else "unlimited"


def main(config: Config) -> None:
    if config.trace is None:
        raise ValueError("--trace: the path of a Mooncake trace (JSONL) is needed")
    requests, notes = read(config)
    for note in notes:
        print(f"mooncake: {note}")
    prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    textbook = [
        {"block_size": size, "shared_tokens": TEXTBOOK_SHARED_TOKENS, "hits": textbook_hits(size)}
        for size in TEXTBOOK_BLOCK_SIZES
    ]
    columns = {"block_size": "block size", "hits": "tokens found", "blocks": "blocks found"}
    found = [row | {"blocks": row["hits"] // row["block_size"]} for row in textbook]
    print_rows("Two prompts that share their first 15 tokens", found, columns)
    points = [(pool, size) for pool in config.pool_tokens for size in config.block_size]
    rows = grid(partial(measure, config=config), points, config, unit="replay")
    title = f"Prefix cache on {len(requests):,} requests with {prompt_tokens:,} prompt tokens"
    facts: dict[str, Any] = {"requests": len(requests), "prompt_tokens": prompt_tokens}
    report(title, rows, config, textbook=textbook, **facts)
    labels = "block size (tokens)", "prompt tokens found in the cache (%)"
    with figures.panel(config.out_dir, "prefix_hit_rate.png", *labels, ylim=(0, None)) as axes:
        figures.lines(axes, figures.series(rows, "block_size", "hit_percent", pool_label))
        figures.powers_of_two(axes, config.block_size)


def claims(results: Results) -> Iterator[Claim]:
    """The paper gives no hit rates."""
    rates = [100 * case["hit_tokens"] / results["prompt_tokens"] for case in results["cases"]]
    yield Claim(
        "prompt tokens found in the cache, by block size and pool",
        "-",
        f"{min(rates):.1f} to {max(rates):.1f} %",
        note="of the trace that was given",
    )


if __name__ == "__main__":
    run(main, Config)
