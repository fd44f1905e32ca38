"""What a prefix cache of a given block size finds of each prompt, from the memory manager alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paged_jax.memory.block_manager import BlockManager
from paged_jax.memory.stats import SharingStats


@dataclass(frozen=True, slots=True)
class Replay:
    """Prompts, one after the other: what was found of each, and what the cache counted."""

    hit_tokens: list[int]
    stats: SharingStats
    too_long: int  # prompts that the pool can never hold


def replay(prompts: Iterable[Sequence[int]], num_blocks: int, block_size: int) -> Replay:
    """Admit, compute and end each prompt before the next.

    So a prompt finds what those before it left, unless it was evicted; outputs are not kept.
    """
    memory = BlockManager(1 + num_blocks, block_size)
    hit_tokens: list[int] = []
    too_long = 0
    for seq_id, prompt in enumerate(prompts):
        found = memory.allocate(seq_id, prompt, max_num_tokens=len(prompt))
        if found is None:
            too_long += 1
            hit_tokens.append(0)
            continue
        memory.publish(seq_id, prompt, len(prompt))
        memory.free(seq_id)
        hit_tokens.append(found)
    return Replay(hit_tokens, memory.stats, too_long)
