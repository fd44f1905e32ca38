"""Block pool: each block free, cached or used, references counted, misuse refused."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from paged_jax.memory.block_pool import NULL_BLOCK, BlockPool


def test_null_block_is_never_handed_out():
    pool = BlockPool(num_blocks=5)
    assert pool.capacity == pool.num_free == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_freed_blocks_are_reused():
    pool = BlockPool(num_blocks=4)
    first, second, third = pool.allocate(3)
    pool.release(second)
    assert pool.allocate(1) == [second]
    pool.release(third)
    pool.release(first)
    assert sorted(pool.allocate(2)) == sorted([first, third])


def test_a_shared_block_is_free_after_its_last_release():
    pool = BlockPool(num_blocks=3)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    assert pool.ref_counts[block] == 2
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2


def test_double_free_raises_with_the_block():
    pool = BlockPool(num_blocks=8)
    block = pool.allocate(3)[-1]
    pool.release(block)
    with pytest.raises(RuntimeError, match=f"block {block} is not in use.*freed twice"):
        pool.release(block)
    pool.check_invariants()


def test_null_block_cannot_be_freed_or_shared():
    pool = BlockPool(num_blocks=2)
    with pytest.raises(RuntimeError, match="block 0"):
        pool.release(NULL_BLOCK)
    with pytest.raises(RuntimeError, match="block 0"):
        pool.acquire(NULL_BLOCK)


def test_a_free_block_cannot_be_shared():
    pool = BlockPool(num_blocks=4)
    with pytest.raises(RuntimeError, match="block 2 is not in use"):
        pool.acquire(2)


def test_asking_for_more_than_is_free_changes_nothing():
    pool = BlockPool(num_blocks=4)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 free of 3"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_invariants()


def test_cached_blocks_are_handed_out_only_once_they_are_evicted():
    pool = BlockPool(num_blocks=3)
    first, second = pool.allocate(2)
    pool.release(first, keep=True)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 1, 0)
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 free of 2"):
        pool.allocate(1)
    assert pool.evict() == first
    assert pool.allocate(1) == [first]
    with pytest.raises(KeyError):
        pool.evict()
    pool.check_invariants()


def test_the_block_let_go_first_is_evicted_first():
    pool = BlockPool(num_blocks=5)
    a, b, c, d = pool.allocate(4)
    for block in (b, a, d, c):
        pool.release(block, keep=True)
    pool.acquire(b)  # used again, and let go last
    pool.release(b, keep=True)
    assert pool.cached == [a, d, c, b]
    assert [pool.evict() for _ in range(4)] == [a, d, c, b]


def test_a_cached_block_is_taken_back_or_discarded_by_number():
    pool = BlockPool(num_blocks=3)
    first, second = pool.allocate(2)
    pool.release(first, keep=True)
    pool.release(second, keep=True)
    pool.acquire(second)
    assert (pool.ref_counts[second], pool.cached) == (1, [first])
    pool.discard(first)
    assert pool.allocate(1) == [first]
    with pytest.raises(KeyError):
        pool.discard(first)


def test_only_the_last_release_makes_a_block_cached():
    pool = BlockPool(num_blocks=2)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    pool.release(block, keep=True)
    assert pool.num_cached == 0
    pool.release(block, keep=True)
    assert pool.num_cached == 1
    with pytest.raises(RuntimeError, match=f"block {block} is not in use"):
        pool.release(block)


@pytest.mark.parametrize("num_blocks", [1, 0, -3])
def test_a_pool_needs_a_block_beside_the_null_block(num_blocks):
    with pytest.raises(ValueError, match=f"at least 2 .*got {num_blocks}"):
        BlockPool(num_blocks)


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, acquire, release, evict against a plain count of references."""

    references = Bundle("references")  # one element for each reference held
    CAPACITY = 7

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.CAPACITY + 1)
        self.held: list[int] = []  # a block as often as it is referenced
        self.cached: list[int] = []  # in the order in which they were let go

    @rule(target=references, count=st.integers(0, 4))
    def allocate(self, count):
        if count > self.pool.num_free:
            with pytest.raises(RuntimeError, match="asked for"):
                self.pool.allocate(count)
            return multiple()
        blocks = self.pool.allocate(count)
        assert len(blocks) == count
        assert not {*self.held, *self.cached} & {*blocks}
        self.held += blocks
        return multiple(*blocks)

    @rule(target=references, block=references)
    def acquire(self, block):
        self.pool.acquire(block)
        self.held.append(block)
        return block

    @precondition(lambda self: self.cached)
    @rule(target=references, index=st.integers(0, CAPACITY))
    def acquire_a_cached_one(self, index):
        block = self.cached.pop(index % len(self.cached))
        return self.acquire(block)

    @rule(block=consumes(references), keep=st.booleans())
    def release(self, block, keep):
        self.pool.release(block, keep=keep)
        self.held.remove(block)
        if keep and block not in self.held:
            self.cached.append(block)

    @rule(block=st.integers(0, CAPACITY))
    def release_what_nobody_holds(self, block):
        if block not in self.held:
            with pytest.raises(RuntimeError, match=f"block {block} "):
                self.pool.release(block)

    @precondition(lambda self: self.cached)
    @rule()
    def evict(self):
        assert self.pool.evict() == self.cached.pop(0)

    @precondition(lambda self: self.cached)
    @rule(index=st.integers(0, CAPACITY))
    def discard(self, index):
        self.pool.discard(self.cached.pop(index % len(self.cached)))

    @invariant()
    def counts_match(self):
        self.pool.check_invariants()
        assert self.pool.cached == self.cached
        assert self.pool.num_used == len(set(self.held))
        assert self.pool.num_free + len(self.cached) + len(set(self.held)) == self.CAPACITY
        for block in range(1, self.CAPACITY + 1):
            assert self.pool.ref_counts[block] == self.held.count(block)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
