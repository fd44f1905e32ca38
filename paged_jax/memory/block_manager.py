"""Paged memory: block tables that grow one block at a time."""

from collections import Counter
from collections.abc import Mapping

from paged_jax.memory.block_pool import BlockPool
from paged_jax.memory.usage import MemoryUsage


class BlockManager:
    """Block tables over a pool of `num_blocks` physical blocks, the null block included.

    Implements `paged_jax.memory.interface.MemoryManager`.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}
        self._num_prefill_tokens: dict[int, int] = {}  # slots asked for by `allocate`

    @property
    def num_total_blocks(self) -> int:
        return self._pool.capacity

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def can_ever_hold(self, num_tokens: int) -> bool:
        return num_tokens <= self._pool.capacity * self.block_size

    def allocate(
        self, seq_id: int, num_tokens: int, *, max_num_tokens: int, keep_free_blocks: int = 0
    ) -> bool:
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} has a block table already")
        num_blocks = -(-num_tokens // self.block_size)
        if num_blocks + keep_free_blocks > self._pool.num_free:
            return False
        self._tables[seq_id] = self._pool.allocate(num_blocks)
        self._num_prefill_tokens[seq_id] = num_tokens
        return True

    def append(self, seq_id: int, num_tokens: int) -> bool:
        table = self._tables[seq_id]
        if len(table) * self.block_size >= num_tokens:
            return True
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing > self._pool.num_free:
            return False
        table += self._pool.allocate(missing)
        return True

    def free(self, seq_id: int) -> None:
        table = self._tables.pop(seq_id)
        del self._num_prefill_tokens[seq_id]
        release = self._pool.release
        for block in reversed(table):  # the stack then hands them out in the same order again
            release(block)

    def block_table(self, seq_id: int) -> list[int]:
        return self._tables[seq_id]

    def usage(self, num_computed_tokens: Mapping[int, int]) -> MemoryUsage:
        token_states = reserved = 0
        for seq_id, num_prefill_tokens in self._num_prefill_tokens.items():
            num_computed = num_computed_tokens[seq_id]
            token_states += num_computed
            if num_computed < num_prefill_tokens:
                reserved += num_prefill_tokens - num_computed
        used = (self._pool.capacity - self._pool.num_free) * self.block_size
        return MemoryUsage(
            token_states=token_states,
            reserved=reserved,
            internal=used - token_states - reserved,
            external=0,
            free=self._pool.num_free * self.block_size,
        )

    def check_invariants(self) -> None:
        """AssertionError unless reference counts equal the tables that hold each block."""
        self._pool.check_invariants()
        held = Counter(block for table in self._tables.values() for block in table)
        for block in range(self._pool.num_blocks):
            count = self._pool.ref_count(block)
            assert count == held[block], f"block {block}: {count=}, in {held[block]} tables"
        assert self._tables.keys() == self._num_prefill_tokens.keys()
