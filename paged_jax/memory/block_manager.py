"""Paged memory: block tables that grow one block at a time and share their common blocks."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from itertools import takewhile

from paged_jax.memory.block_pool import BlockPool
from paged_jax.memory.holding import Holding, paged_usage
from paged_jax.memory.interface import Swaps
from paged_jax.memory.prefix_cache import Node, PrefixCache
from paged_jax.memory.swap_space import SwapSpace
from paged_jax.memory.usage import MemoryUsage, SharingStats


class BlockManager:
    """Block tables over a pool of `num_blocks` physical blocks, the null block included.

    Implements `paged_jax.memory.interface.MemoryManager`. Without `enable_prefix_caching` a block's
    contents are forgotten with its last reference: a sequence finds only blocks that sequences of
    the same salt hold at the time, and nothing can be pinned. Sequences are swapped out to
    `num_swap_blocks` blocks in host memory.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
    ):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.stats = SharingStats()
        self._keeps_prefixes = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self.num_total_blocks = self._pool.capacity
        self._ref_counts = self._pool.ref_counts
        self._cache = PrefixCache(block_size)
        self._tables: dict[int, list[int]] = {}
        self._holdings: dict[int, Holding] = {}
        self._swaps = SwapSpace(num_swap_blocks)
        self.num_swap_blocks = num_swap_blocks
        self._copies: dict[int, int] = {}  # target -> source
        self._pins: dict[tuple[Hashable, tuple[int, ...]], list[int]] = {}  # blocks, one ref each
        # The sequence that last did not fit, and its nodes in the prefix cache: it will ask again.
        self._waiting: tuple[int, list[Node]] | None = None

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free + self._pool.num_cached

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_cached

    @property
    def num_pinned_blocks(self) -> int:
        return len(set().union(*self._pins.values()))

    @property
    def num_free_swap_blocks(self) -> int:
        return self._swaps.num_free

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
        self._check_is_new(seq_id)
        if not token_ids:
            raise ValueError(f"sequence {seq_id} has no tokens")
        pool, num_tokens = self._pool, len(token_ids)
        num_blocks = -(-num_tokens // self.block_size)
        match: list[Node] = []
        if use_cache:
            if self._waiting is not None and self._waiting[0] == seq_id:
                match = self._waiting[1]
            self._cache.extend(match, salt, token_ids, (num_tokens - 1) // self.block_size)
        # Nodes before a used node are used: a match is some used nodes, then some cached nodes.
        num_used = bisect_left(match, True, key=lambda node: not self._ref_counts[node.block])
        if num_blocks - num_used + keep_free_blocks > self.num_free_blocks:
            if match:
                self._waiting = seq_id, match
            return None
        self._waiting = None
        hits = [node.block for node in match]
        for block in hits:  # before the rest is taken, so that none of them is evicted for it
            pool.acquire(block)
        self._tables[seq_id] = hits + self._take(num_blocks - len(hits))
        self._holdings[seq_id] = Holding(salt, num_tokens, len(match), match[-1] if match else None)
        num_hit_tokens = len(hits) * self.block_size
        if use_cache:
            self.stats.queried_tokens += num_tokens
            self.stats.hit_tokens += num_hit_tokens
        return num_hit_tokens

    def num_blocks_needed(
        self, num_prompt_tokens: int, max_num_tokens: int, num_sequences: int = 1
    ) -> int:
        """The sequences share the prompt's full blocks, and at worst no others."""
        num_blocks = -(-max_num_tokens // self.block_size)
        num_shared = min(num_prompt_tokens // self.block_size, num_blocks)
        return num_shared + num_sequences * (num_blocks - num_shared)

    def num_forks_left(self, seq_id: int, num_pending: int = 0) -> int:
        return self.num_free_blocks - num_pending

    def append(self, seq_id: int, num_tokens: int) -> bool:
        table = self._tables[seq_id]
        last = (num_tokens - 1) // self.block_size
        missing = last + 1 - len(table)
        if missing <= 0:
            return self._ref_counts[table[last]] == 1 or self._copy_on_write(table, last)
        if missing > self.num_free_blocks:
            return False
        table += self._take(missing)
        return True

    def _copy_on_write(self, table: list[int], index: int) -> bool:
        if not self.num_free_blocks:
            return False
        shared = table[index]
        (block,) = self._take(1)
        table[index] = block
        self._pool.release(shared)  # the other sequences still hold it
        # The target of a pending copy holds nothing yet; its source does.
        self._copies[block] = self._copies.get(shared, shared)
        return True

    def _undo_copy(self, source: int) -> int:
        """Let the sequence that waits for a copy of `source` write `source` itself.

        Called when the last other reference to the source is dropped: no other sequence holds it
        any more. The source takes the target's place in the table, and the copy is not made. So
        every pending copy's source is in use, and no source becomes another copy's target.
        Returns the target, which carries the reference to drop.
        """
        target = next(t for t, s in self._copies.items() if s == source)
        del self._copies[target]
        for table in self._tables.values():
            if target in table:
                table[table.index(target)] = source
        self._pool.exchange(source, target)
        return target

    def fork(self, parent_id: int, child_id: int) -> None:
        self._check_is_new(child_id)
        table = self._tables[parent_id].copy()
        ref_counts = self._ref_counts
        for block in table:  # all in use
            ref_counts[block] += 1
        parent = self._holdings[parent_id]
        parent.shares = True
        self._tables[child_id] = table
        self._holdings[child_id] = copy(parent)
        self.stats.forks += 1

    def pending_copies(self) -> list[tuple[int, int]]:
        return [(source, target) for target, source in self._copies.items()]

    def take_copies(self) -> list[tuple[int, int]]:
        copies = self.pending_copies()
        self._copies.clear()
        self.stats.copies += len(copies)
        return copies

    def commit_full_blocks(
        self, seq_id: int, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        holding = self._holdings[seq_id]
        table, size = self._tables[seq_id], self.block_size
        num_full = num_computed_tokens // size
        if num_full <= holding.num_committed:
            return
        if num_computed_tokens > len(token_ids) or num_full > len(table):
            raise ValueError(
                f"sequence {seq_id}: {num_computed_tokens} tokens computed of {len(token_ids)}, "
                f"in {len(table)} blocks of {size} slots"
            )
        nodes = self._cache.add(
            holding.last_node,
            holding.salt,
            token_ids[holding.num_committed * size : num_full * size],
            table[holding.num_committed : num_full],
        )
        for node in nodes:
            if not self._ref_counts[node.block]:  # the new duplicate replaces the cached block
                self._pool.discard(self._cache.replace(node))
        holding.last_node = nodes[-1]
        holding.num_committed = num_full

    def free(self, seq_id: int, *, discard: bool = False) -> None:
        if seq_id in self._swaps.tables:
            self._swaps.free(seq_id)
            return
        table = self._tables.pop(seq_id)
        del self._holdings[seq_id]
        kept = self._release(table)
        if discard and kept is not None:
            for block in self._cache.forget_chains(kept):
                self._pool.discard(block)

    def swap_out(self, seq_ids: Sequence[int]) -> bool:
        sequences: dict[int, tuple[list[int], int, int]] = {}
        for seq_id in seq_ids:
            # The target of a pending copy has the contents of its source.
            contents = [self._copies.get(block, block) for block in self._tables[seq_id]]
            holding = self._holdings[seq_id]
            sequences[seq_id] = contents, holding.num_full, holding.num_prefill_tokens
        if not self._swaps.put(sequences):
            return False
        for seq_id in seq_ids:
            del self._holdings[seq_id]
            self._release(self._tables.pop(seq_id))
        return True

    def swap_in(
        self,
        seq_ids: Sequence[int],
        token_ids: Mapping[int, Sequence[int]],
        *,
        salt: Hashable = None,
        keep_free_blocks: int = 0,
    ) -> bool:
        pool, swapped = self._pool, {seq_id: self._swaps.tables[seq_id] for seq_id in seq_ids}
        matches: dict[int, list[Node]] = {seq_id: [] for seq_id in seq_ids}
        device_of: dict[int, int] = {}  # by host block
        for seq_id, match in matches.items():
            # The sequence is still to write its blocks beyond `num_full`.
            self._cache.extend(match, salt, token_ids[seq_id], swapped[seq_id].num_full)
            hits = (node.block for node in match)
            device_of.update(zip(swapped[seq_id].blocks, hits, strict=False))
        num_holders = Counter(host for table in swapped.values() for host in table.blocks)
        to_move = [host for host in num_holders if host not in device_of]
        num_unused = sum(not self._ref_counts[block] for block in set(device_of.values()))
        if len(to_move) + num_unused + keep_free_blocks > self.num_free_blocks:
            return False
        for host, block in device_of.items():  # before others are taken, so that none is evicted
            for _ in range(num_holders[host]):
                pool.acquire(block)
        for host, block in zip(to_move, self._take(len(to_move)), strict=True):
            for _ in range(num_holders[host] - 1):
                pool.acquire(block)
            self._swaps.add_in(host, block)
            device_of[host] = block
        for seq_id, (hosts, num_full, num_prefill_tokens, _) in swapped.items():
            self._tables[seq_id] = [device_of[host] for host in hosts]
            match = matches[seq_id]
            last_node = match[-1] if match else None
            self._holdings[seq_id] = Holding(
                salt, num_prefill_tokens, len(match), last_node, num_full, shares=len(swapped) > 1
            )
            self._swaps.restore(seq_id)
        return True

    def pending_swaps(self) -> Swaps:
        return self._swaps.pending()

    def take_swaps(self) -> Swaps:
        return self._swaps.take()

    def take_swap_outs(self) -> list[tuple[int, int]]:
        return self._swaps.take_outs()

    def reset(self) -> list[int]:
        lost = [*self._tables, *self._swaps.lose_device()]
        for state in (self._tables, self._holdings, self._copies, self._pins):
            state.clear()
        self._waiting = None
        self._pool = BlockPool(self._pool.num_blocks)
        self._ref_counts = self._pool.ref_counts
        self._cache = PrefixCache(self.block_size)
        return lost

    def pin(
        self, token_ids: Sequence[int], salt: Hashable = None, *, leave_blocks: int = 0
    ) -> int | None:
        if not self._keeps_prefixes:
            raise ValueError("nothing can be pinned: prefix caching is off")
        match: list[Node] = []
        self._cache.extend(match, salt, token_ids, len(token_ids) // self.block_size)
        blocks = [node.block for node in match]
        pins = self._pins | {(salt, tuple(token_ids)): blocks}
        if self._pool.capacity - len(set().union(*pins.values())) < leave_blocks:
            return None
        for block in blocks:
            self._pool.acquire(block)
        self._release(self._pins.get((salt, tuple(token_ids)), []))
        self._pins = pins
        return len(blocks) * self.block_size

    def num_pinned_tokens(self, token_ids: Sequence[int], salt: Hashable = None) -> int:
        if not self._pins:
            return 0
        match: list[Node] = []
        self._cache.extend(match, salt, token_ids, (len(token_ids) - 1) // self.block_size)
        pinned = set().union(*self._pins.values())
        found = takewhile(lambda node: node.block in pinned, match)
        return sum(1 for _ in found) * self.block_size

    def unpin(self, token_ids: Sequence[int], salt: Hashable = None) -> None:
        self._release(self._pins.pop((salt, tuple(token_ids))))

    def block_table(self, seq_id: int) -> list[int]:
        return self._tables[seq_id]

    def _check_is_new(self, seq_id: int) -> None:
        if seq_id in self._tables or seq_id in self._swaps.tables:
            raise ValueError(f"sequence {seq_id} has a block table already")

    def _take(self, count: int) -> list[int]:
        """Take blocks; the caller has checked that there are enough."""
        pool = self._pool
        for _ in range(count - pool.num_free):
            self._cache.forget(pool.evict())
            self.stats.evictions += 1
        return pool.allocate(count)

    def _release(self, blocks: list[int]) -> int | None:
        """Drop a reference to each block of a table; returns the first that becomes cached by that.

        The last block goes first: it is then evicted before the blocks that lead to it, and the
        stack of free blocks hands them out in the same order again.
        """
        pool, ref_counts, first_kept = self._pool, self._ref_counts, None
        for block in reversed(blocks):
            keep = False
            if ref_counts[block] == 1:
                if self._copies:
                    self._copies.pop(block, None)
                    if block in self._copies.values():
                        block = self._undo_copy(block)
                if self._swaps.ins:
                    self._swaps.cancel_in(block)
                keep = self._cache.let_go(block)
                if keep and not self._keeps_prefixes:
                    self._cache.forget(block)
                    keep = False
                if keep:
                    first_kept = block
            pool.release(block, keep=keep)
        return first_kept

    def usage(self, num_computed_tokens: Mapping[int, int]) -> MemoryUsage:
        return paged_usage(
            self._pool,
            self.block_size,
            self._tables,
            self._holdings,
            self._pins.values(),
            num_computed_tokens,
        )

    def check_invariants(self) -> None:
        """AssertionError unless tables, pins, counts, copies and cache agree."""
        self._pool.check_invariants()
        tables = [*self._tables.values(), *self._pins.values()]
        held = Counter(block for table in tables for block in table)
        for block in range(self._pool.num_blocks):
            count = self._ref_counts[block]
            assert count == held[block], f"block {block}: {count=}, in {held[block]} tables"
        assert all(len(set(table)) == len(table) for table in tables), "a block is in a table twice"
        assert self._tables.keys() == self._holdings.keys()
        for seq_id, holding in self._holdings.items():
            committed = self._tables[seq_id][: holding.num_committed]
            self._cache.check_chain(holding.last_node, holding.salt, committed)
        copied = {*self._copies, *self._copies.values()}
        assert all(self._ref_counts[block] for block in copied), "a copy of or to an unused block"
        assert self._copies.keys().isdisjoint(self._copies.values()), "a copy of a copy's target"
        self._cache.check_invariants(self._ref_counts, self._pool.cached)
        self._swaps.check_invariants()
        assert self._tables.keys().isdisjoint(self._swaps.tables), "in both places"
        coming = self._swaps.ins.keys()
        assert all(self._ref_counts[block] for block in coming), "a swap into an unused block"
        assert coming.isdisjoint(self._copies), "a swap into the target of a copy"
