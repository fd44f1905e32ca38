"""What the block manager keeps for each sequence beside its table."""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

from paged_jax.memory.block_pool import BlockPool
from paged_jax.memory.prefix_cache import Node
from paged_jax.memory.usage import MemoryUsage


class Holding:
    """One sequence's part in the prefix cache, and what it may share."""

    __slots__ = (
        "last_node",
        "next_full",
        "num_committed",
        "num_prefill_tokens",
        "num_restored",
        "salt",
        "shares",
    )

    def __init__(
        self,
        salt: Hashable,
        num_prefill_tokens: int,
        block_size: int,
        match: Sequence[Node],
        *,
        num_restored: int = 0,
        shares: bool = False,
    ):
        self.salt = salt
        self.num_prefill_tokens = num_prefill_tokens  # slots asked for by `allocate`
        self.num_committed = len(match)  # leading blocks that have nodes
        self.last_node = match[-1] if match else None  # of the last of these
        self.next_full = (len(match) + 1) * block_size  # tokens that complete one more block
        # Leading blocks that it had committed before it was swapped out, and may have to again.
        self.num_restored = num_restored
        self.shares = shares  # whether another sequence may hold its blocks beyond those committed

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
    """Split the pool's slots; the mappings are by sequence, `pins` are blocks of each prefix.

    Runs in every iteration: a look at each sequence, and at the blocks of those alone that share
    some which are not full.
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
    # A block counts as full if it is so for any of its sequences.
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
