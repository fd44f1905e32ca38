"""What a prefix cache of a given block size finds of each prompt, from the memory manager alone."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from paged_jax.memory.block_manager import BlockManager
from paged_jax.workloads import MooncakeRow
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
            memory.publish(seq_id, numbers, num_whole)
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
