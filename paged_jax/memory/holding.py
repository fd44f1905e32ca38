"""What the block manager keeps for each sequence beside its table, and the usage of all tables."""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from paged_jax.memory.block_pool import BlockPool
from paged_jax.memory.prefix_cache import Node
from paged_jax.memory.usage import MemoryUsage


@dataclass(slots=True)
class Holding:
    """One sequence's part in the prefix cache, and whether it may share blocks beyond that."""

    salt: Hashable
    num_prefill_tokens: int  # slots that `allocate` was asked for
    num_committed: int  # leading blocks that have nodes
    last_node: Node | None  # the node of the last of these blocks
    # Leading blocks that it had committed before it was swapped out, and may have to commit again.
    num_restored: int = 0
    shares: bool = False  # whether another sequence may hold its blocks beyond the committed ones

    @property
    def num_full(self) -> int:
        """Leading blocks that are known to be computed."""
        return max(self.num_committed, self.num_restored)


def paged_usage(
    pool: BlockPool,
    block_size: int,
    tables: Mapping[int, Sequence[int]],
    holdings: Mapping[int, Holding],
    pins: Collection[Sequence[int]],
    num_computed_tokens: Mapping[int, int],
) -> MemoryUsage:
    """Split the pool's slots; the mappings are by sequence id, `pins` are each prefix's blocks.

    This runs in every iteration: it looks at each sequence, and at single blocks only of sequences
    that share blocks which are not full.
    """
    token_states = reserved = num_tail_blocks = num_table_blocks = 0
    shared_tails: dict[int, tuple[int, int]] = {}  # block -> slots computed, slots asked for
    forked: list[tuple[Sequence[int], int]] = []
    for seq_id, holding in holdings.items():
        table, num_prefill = tables[seq_id], holding.num_prefill_tokens
        num_computed = num_computed_tokens[seq_id]
        num_full = num_computed // block_size
        num_table_blocks += len(table)
        if not holding.shares:
            num_tail_blocks += len(table) - num_full
            token_states += num_computed - num_full * block_size
            if num_computed < num_prefill:
                reserved += num_prefill - num_computed
            continue
        forked.append((table, num_full))
        for index in range(num_full, len(table)):
            computed = max(0, num_computed - index * block_size)
            asked_for = min(block_size, max(0, num_prefill - index * block_size))
            before = shared_tails.get(table[index], (0, 0))
            shared_tails[table[index]] = max(before[0], computed), max(before[1], asked_for)
    # A block counts as full if it is full for any of its sequences.
    for table, num_full in forked:
        for block in shared_tails.keys() & table[:num_full]:
            del shared_tails[block]
    for computed, asked_for in shared_tails.values():
        token_states += computed
        reserved += max(0, asked_for - computed)
    num_tail_blocks += len(shared_tails)
    token_states += (pool.num_used - num_tail_blocks) * block_size  # all others are full
    pinned = Counter(block for blocks in pins for block in blocks)
    only_pinned = sum(pool.ref_counts[block] == count for block, count in pinned.items())
    return MemoryUsage(
        token_states=token_states,
        reserved=reserved,
        internal=pool.num_used * block_size - token_states - reserved,
        external=0,
        free=(pool.num_free + pool.num_cached) * block_size,
        cached=pool.num_cached * block_size,
        shared=(num_table_blocks - (pool.num_used - only_pinned)) * block_size,
    )
