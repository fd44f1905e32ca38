"""What the scheduler and the executor ask of any memory manager, paged or contiguous."""

from collections.abc import Mapping
from typing import Protocol

from paged_jax.memory.usage import MemoryUsage


class MemoryManager(Protocol):
    """Grants KV slots to sequences, which it knows by id alone.

    A slot holds the keys and values of one token. Requests that cannot be met now are answered
    with False and change nothing, so the caller never has to ask before it acts.
    """

    @property
    def block_size(self) -> int:
        """Slots per block."""

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can be handed out; the null block is not one of them."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether one sequence of `num_tokens` slots fits when it is alone."""

    def allocate(
        self, seq_id: int, num_tokens: int, *, max_num_tokens: int, keep_free_blocks: int = 0
    ) -> bool:
        """Give a new sequence a table that covers `num_tokens` slots.

        False, and nothing changes, unless it fits and leaves `keep_free_blocks` blocks free.
        `max_num_tokens` is the most slots the sequence can come to need; contiguous managers
        reserve by it.
        """

    def append(self, seq_id: int, num_tokens: int) -> bool:
        """Make the sequence's table cover `num_tokens` slots, with no more blocks than that takes.

        False, and nothing changes, when memory is out. A table that covers them already is left
        as it is. Runs once per sequence and iteration, so it has to be fast.
        """

    def free(self, seq_id: int) -> None:
        """Take back all blocks of a sequence and forget it; KeyError if it holds none."""

    def block_table(self, seq_id: int) -> list[int]:
        """The sequence's physical blocks in order of position.

        This is the live list, not a copy: callers only read it. Until the sequence is freed it
        only ever grows at its end, so a mirror may copy just the tail.
        """

    def usage(self, num_computed_tokens: Mapping[int, int]) -> MemoryUsage:
        """Split all slots by what they hold.

        `num_computed_tokens` maps each sequence that holds a table to the number of its tokens
        whose keys and values are in the cache.
        """
