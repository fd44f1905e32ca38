"""Memory managers by name: how KV slots are granted, all else equal."""

from paged_jax.memory.block_manager import BlockManager
from paged_jax.memory.contiguous import RESERVATIONS, ContiguousManager
from paged_jax.memory.interface import MemoryManager

PAGED = "paged"


def memory_policies() -> tuple[str, ...]:
    """The names that `make_memory` knows."""
    return PAGED, *RESERVATIONS


def make_memory(
    policy: str,
    num_blocks: int,
    block_size: int,
    *,
    max_model_len: int,
    enable_prefix_caching: bool = True,
    num_swap_blocks: int = 0,
) -> MemoryManager:
    """An empty manager of `num_blocks` blocks, the null block included.

    policy: "paged", or a name of `RESERVATIONS`: contiguous, without prefix cache and swapping.
    max_model_len: tokens of the longest sequence; contiguous managers reserve by it.

    ValueError for an unknown policy, and for swap space where nothing is swapped.
    """
    if policy == PAGED:
        return BlockManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_swap_blocks=num_swap_blocks,
        )
    if policy not in RESERVATIONS:
        raise ValueError(f"unknown memory_policy {policy!r}; one of {', '.join(memory_policies())}")
    if num_swap_blocks:
        raise ValueError(
            f"memory_policy {policy!r} preempts nobody to make room, so it swaps nothing; got a "
            f"swap space of {num_swap_blocks} blocks, set it to 0"
        )
    return ContiguousManager(
        num_blocks, block_size, max_model_len=max_model_len, reservation=RESERVATIONS[policy]
    )
