"""Contiguous memory: each sequence in one piece, reserved when it is admitted (section 6.1, Orca).

The paper's baselines are three reservations, functions that say how many slots to reserve, over one
buddy allocator. It rounds a reservation up to a chunk of a power of two blocks, which `usage`
splits:

    |<---------------------------------- chunk --------------------------------->|
    | computed      | to come      | never used           | rounding              |
      token states    reserved       internal               external

"To come" ends where the sequence does, as far as `max_num_tokens` tells: exactly, if it runs to its
full length, as requests of a trace do. The allocator's rounding counts as external fragmentation,
as in the paper's Figure 2, where Orca (Oracle) has no internal one. External are also holes too
small for the sequence that was last refused, until memory is freed, and holes too small for any
sequence.

Sequences that branch off one another get a chunk each. Until a sequence writes something of its
own, it holds the chunk of the sequence that it branched off. The first to write moves to another
chunk, and all of its blocks are copied, as systems without paging do (section 4.4). `allocate`
reserves a chunk for each of `num_sequences`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from paged_jax.memory.block_pool import NULL_BLOCK
from paged_jax.memory.buddy import BuddyAllocator, order_of
from paged_jax.memory.interface import Swaps
from paged_jax.memory.usage import MemoryUsage, SharingStats

FIRST_BLOCK = NULL_BLOCK + 1  # stands for the buddy allocator's first unit

# (num_prompt_tokens, max_num_tokens, max_model_len) -> slots to reserve
Reservation = Callable[[int, int, int], int]


def reserve_max(num_prompt_tokens: int, max_num_tokens: int, max_model_len: int) -> int:
    """Orca (Max): as many slots as the longest sequence has tokens."""
    return max_model_len


def reserve_pow2(num_prompt_tokens: int, max_num_tokens: int, max_model_len: int) -> int:
    """Orca (Pow2): the output rounded up to a power of two, at most twice what it needs."""
    num_output_tokens = max_num_tokens + 1 - num_prompt_tokens  # the last one needs no slot
    return min(num_prompt_tokens + (1 << order_of(num_output_tokens)), max_model_len)


def reserve_oracle(num_prompt_tokens: int, max_num_tokens: int, max_model_len: int) -> int:
    """Orca (Oracle): what the sequence needs; its length is known if nothing ends it early."""
    return max_num_tokens


RESERVATIONS: dict[str, Reservation] = {
    "orca_max": reserve_max,
    "orca_pow2": reserve_pow2,
    "orca_oracle": reserve_oracle,
}


class _Family:
    """Sequences that branched off one another: they hold chunks of one size."""

    __slots__ = ("max_num_tokens", "num_chunks", "num_promised", "num_seqs", "num_slots", "spare")

    def __init__(self, num_slots: int, max_num_tokens: int, chunks: list[int]):
        self.num_slots = num_slots  # reserved for each sequence
        self.max_num_tokens = max_num_tokens  # slots of these that will be used
        self.num_seqs = 1
        self.num_promised = len(chunks) - 1  # sequences still to branch off, each with its chunk
        self.num_chunks = len(chunks)
        self.spare = chunks[1:]  # chunks that no sequence holds


class ContiguousManager:
    """Reserves consecutive blocks of a pool of `num_blocks`, the null block included.

    Implements `paged_jax.memory.interface.MemoryManager`, without prefix cache, pins and swapping.
    No sequence grows beyond its reservation, so `append` takes memory only for sequences that
    branched off without a reservation, and `allocate` keeps no blocks free for others to grow.
    """

    num_cached_blocks = num_pinned_blocks = num_swap_blocks = num_free_swap_blocks = 0

    def __init__(
        self, num_blocks: int, block_size: int, *, max_model_len: int, reservation: Reservation
    ):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.stats = SharingStats()
        self._reserve = reservation
        self._max_model_len = max_model_len
        self.num_total_blocks = num_blocks - 1
        self._buddy = BuddyAllocator(self.num_total_blocks)
        least = reservation(1, 1, max_model_len)
        self._smallest_order = self._order(least)
        if not self._buddy.capacity(self._smallest_order):
            raise ValueError(
                f"every sequence reserves at least {least} slots, a chunk of "
                f"{1 << self._smallest_order} blocks of {block_size}, and the pool has "
                f"{num_blocks - 1}; give it more blocks or lower max_model_len {max_model_len}"
            )
        self._families: dict[int, _Family] = {}  # by sequence
        self._tables: dict[int, list[int]] = {}
        self._num_holders: Counter[int] = Counter()  # sequences that hold a chunk, by chunk
        self._moves: dict[int, tuple[int, int]] = {}  # chunk -> (copied from, blocks), pending
        self._refused_order = 0  # order of the chunk last refused; 0 once memory has been freed
        # Slots of all chunks held, reserved slots of these, slots of these that will be used.
        self._chunk_slots = self._reserved_slots = self._used_slots = 0
        self._shared_slots = 0  # slots that sequences would hold besides if none shared a chunk

    @property
    def num_free_blocks(self) -> int:
        return self._buddy.num_free

    def num_blocks_needed(
        self, num_prompt_tokens: int, max_num_tokens: int, num_sequences: int = 1
    ) -> int:
        num_slots = self._reserve(num_prompt_tokens, max_num_tokens, self._max_model_len)
        return num_sequences << self._order(num_slots)

    def allocate(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        *,
        salt: Hashable = None,
        max_num_tokens: int,
        num_prompt_tokens: int | None = None,
        num_sequences: int = 1,
        keep_free_blocks: int = 0,
        use_cache: bool = True,
    ) -> int | None:
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id} has a block table already")
        if not token_ids:
            raise ValueError(f"sequence {seq_id} has no tokens")
        needed = max(max_num_tokens, len(token_ids))
        # A preempted sequence reserves as much as at first, for its prompt: more might never fit.
        num_prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
        num_slots = self._reserve(num_prompt, needed, self._max_model_len)
        if num_slots < needed:
            raise ValueError(f"sequence {seq_id}: {num_slots} slots reserved, {needed} needed")
        order, buddy = self._order(num_slots), self._buddy
        # Where they never fit side by side, the sequences left over come in on their own, later.
        num_chunks = max(1, min(num_sequences, buddy.capacity(order)))
        if buddy.num_free_chunks(order) < num_chunks:
            self._refused_order = order
            return None
        self._refused_order = 0
        chunks = [self._take(order) for _ in range(num_chunks)]
        family = self._families[seq_id] = _Family(num_slots, needed, chunks)
        self._account(family, num_chunks)
        self._tables[seq_id] = self._blocks(chunks[0], family)
        self._num_holders[chunks[0]] = 1
        return 0

    def append(self, seq_id: int, num_tokens: int) -> bool:
        family = self._families[seq_id]
        if num_tokens > family.num_slots:
            raise ValueError(
                f"sequence {seq_id}: {num_tokens} slots asked for, {family.num_slots} reserved"
            )
        if family.num_promised:  # a sequence that has not branched off by now comes in on its own
            family.num_promised = 0
            self._give_back(family)
        table = self._tables[seq_id]
        chunk = table[0] - FIRST_BLOCK
        return self._num_holders[chunk] == 1 or self._move(table, chunk, family, num_tokens - 1)

    def _move(self, table: list[int], chunk: int, family: _Family, num_computed: int) -> bool:
        """Give a sequence a chunk of its own in place of one that it shares."""
        if family.spare:
            own = family.spare.pop()
        else:
            order = self._order(family.num_slots)
            if not self._buddy.num_free_chunks(order):
                return False
            own = self._take(order)
            family.num_chunks += 1
            self._account(family, 1)
        # The target of a pending copy holds nothing yet; its source does.
        source, _ = self._moves.get(chunk, (chunk, 0))
        self._moves[own] = source, -(-num_computed // self.block_size)
        self._num_holders[chunk] -= 1
        self._num_holders[own] = 1
        self._shared_slots -= len(table) * self.block_size
        table[:] = self._blocks(own, family)
        return True

    def fork(self, parent_id: int, child_id: int) -> None:
        if child_id in self._tables:
            raise ValueError(f"sequence {child_id} has a block table already")
        table = self._tables[parent_id].copy()
        family = self._families[parent_id]
        family.num_seqs += 1
        family.num_promised = max(0, family.num_promised - 1)
        self._num_holders[table[0] - FIRST_BLOCK] += 1
        self._shared_slots += len(table) * self.block_size
        self._tables[child_id], self._families[child_id] = table, family
        self.stats.forks += 1

    def num_forks_left(self, seq_id: int, num_pending: int = 0) -> int:
        return self._families[seq_id].num_promised

    def pending_copies(self) -> list[tuple[int, int]]:
        return [
            (FIRST_BLOCK + source + i, FIRST_BLOCK + target + i)
            for target, (source, num_blocks) in self._moves.items()
            for i in range(num_blocks)
        ]

    def take_copies(self) -> list[tuple[int, int]]:
        copies = self.pending_copies()
        self._moves.clear()
        self.stats.copies += len(copies)
        return copies

    def commit_full_blocks(
        self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Nothing to commit: a contiguous sequence cannot begin with another one's blocks."""

    def free(self, seq_id: int, *, discard: bool = False) -> None:
        chunk = self._tables.pop(seq_id)[0] - FIRST_BLOCK
        family = self._families.pop(seq_id)
        family.num_seqs -= 1
        self._num_holders[chunk] -= 1
        if self._num_holders[chunk]:
            self._shared_slots -= self._num_blocks(family) * self.block_size
        else:
            self._moves.pop(chunk, None)
            if any(source == chunk for source, _ in self._moves.values()):
                chunk = self._undo_move(chunk, family)
            del self._num_holders[chunk]
            family.spare.append(chunk)
        self._give_back(family)

    def _undo_move(self, source: int, family: _Family) -> int:
        """Put a chunk without holders in the place of the chunk that is to be copied from it.

        So no chunk is free while it is still to be read. Returns the other chunk, which is free.
        """
        target = next(t for t, (s, _) in self._moves.items() if s == source)
        del self._moves[target]
        for table in self._tables.values():
            if table[0] - FIRST_BLOCK == target:
                table[:] = self._blocks(source, family)
        self._num_holders[source] = self._num_holders[target]
        return target

    def swap_out(self, seq_ids: Sequence[int]) -> bool:
        return False

    def swap_in(
        self,
        seq_ids: Sequence[int],
        token_ids: Mapping[int, Sequence[int]],
        *,
        salt: Hashable = None,
        keep_free_blocks: int = 0,
    ) -> bool:
        raise KeyError(f"sequences {list(seq_ids)} are not swapped out: there is no host pool")

    def pending_swaps(self) -> Swaps:
        return Swaps([], [])

    def take_swaps(self) -> Swaps:
        return Swaps([], [])

    def take_swap_outs(self) -> list[tuple[int, int]]:
        return []

    def reset(self) -> list[int]:
        lost = list(self._tables)
        for seq_id in lost:
            self.free(seq_id)
        return lost

    def pin(
        self, token_ids: Sequence[int], salt: Hashable = None, *, leave_blocks: int = 0
    ) -> int | None:
        raise ValueError("nothing can be pinned: contiguous memory keeps no prefixes")

    def num_pinned_tokens(self, token_ids: Sequence[int], salt: Hashable = None) -> int:
        return 0

    def unpin(self, token_ids: Sequence[int], salt: Hashable = None) -> None:
        raise KeyError((salt, tuple(token_ids)))

    def block_table(self, seq_id: int) -> list[int]:
        return self._tables[seq_id]

    def usage(self, num_computed_tokens: Mapping[int, int]) -> MemoryUsage:
        size = self.block_size
        if self._shared_slots:
            in_chunks: Counter[int] = Counter()
            for seq_id, table in self._tables.items():
                in_chunks[table[0]] = max(in_chunks[table[0]], num_computed_tokens[seq_id])
            token_states = in_chunks.total()
        else:
            token_states = sum(num_computed_tokens[seq_id] for seq_id in self._tables)
        num_unusable = self._buddy.num_free_below(max(self._smallest_order, self._refused_order))
        return MemoryUsage(
            token_states=token_states,
            reserved=self._used_slots - token_states,
            internal=self._reserved_slots - self._used_slots,
            external=self._chunk_slots - self._reserved_slots + num_unusable * size,
            free=(self._buddy.num_free - num_unusable) * size,
            shared=self._shared_slots,
        )

    def _num_blocks(self, family: _Family) -> int:
        return -(-family.num_slots // self.block_size)

    def _order(self, num_slots: int) -> int:
        return order_of(-(-num_slots // self.block_size))

    def _blocks(self, chunk: int, family: _Family) -> list[int]:
        first = FIRST_BLOCK + chunk
        return list(range(first, first + self._num_blocks(family)))

    def _take(self, order: int) -> int:
        """Take a chunk; the caller has checked that there is one."""
        chunk = self._buddy.allocate(order)
        assert chunk is not None
        return chunk

    def _account(self, family: _Family, num_chunks: int) -> None:
        order = self._order(family.num_slots)
        self._chunk_slots += num_chunks * (self.block_size << order)
        self._reserved_slots += num_chunks * family.num_slots
        self._used_slots += num_chunks * family.max_num_tokens

    def _give_back(self, family: _Family) -> None:
        """Free the spare chunks that no sequence of the family will need."""
        needed = family.num_seqs + family.num_promised if family.num_seqs else 0
        while family.spare and family.num_chunks > needed:
            self._buddy.free(family.spare.pop())
            family.num_chunks -= 1
            self._account(family, -1)
            self._refused_order = 0

    def check_invariants(self) -> None:
        """AssertionError unless tables, chunks, pending copies and sums agree."""
        self._buddy.check_invariants()
        assert self._tables.keys() == self._families.keys()
        size = self.block_size
        holders = Counter(table[0] - FIRST_BLOCK for table in self._tables.values())
        assert holders == self._num_holders
        for seq_id, table in self._tables.items():
            family = self._families[seq_id]
            assert table == self._blocks(table[0] - FIRST_BLOCK, family), f"{table} is no chunk"
        num_members = Counter(map(id, self._families.values()))
        families = {id(family): family for family in self._families.values()}
        chunks: dict[int, _Family] = {}
        for key, family in families.items():
            assert family.num_seqs == num_members[key]
            own = {
                t[0] - FIRST_BLOCK for s, t in self._tables.items() if self._families[s] is family
            }
            assert own.isdisjoint(family.spare)
            assert family.num_chunks == len(own) + len(family.spare)
            assert family.num_chunks <= family.num_seqs + family.num_promised
            assert chunks.keys().isdisjoint({*own, *family.spare}), "a chunk is in two families"
            chunks |= dict.fromkeys((*own, *family.spare), family)
        held = sum(1 << self._order(family.num_slots) for family in chunks.values())
        assert held + self._buddy.num_free == self._buddy.num_units, "a chunk has leaked"
        assert self._chunk_slots == held * size
        assert self._reserved_slots == sum(family.num_slots for family in chunks.values())
        assert self._used_slots == sum(family.max_num_tokens for family in chunks.values())
        shared = sum(len(table) for table in self._tables.values()) - sum(
            self._num_blocks(chunks[chunk]) for chunk in holders
        )
        assert self._shared_slots == shared * size
        moved = {*self._moves, *(source for source, _ in self._moves.values())}
        assert moved <= holders.keys(), "a copy of or to a chunk without holders"
        sources = {source for source, _ in self._moves.values()}
        assert self._moves.keys().isdisjoint(sources), "a copy of a copy's target"
