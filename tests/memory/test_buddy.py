"""Buddy allocation: what is free in one aligned piece can be had, whatever came before."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_jax.memory.buddy import BuddyAllocator, order_of


@pytest.mark.parametrize(
    ("num_units", "order"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)]
)
def test_a_chunk_is_the_next_power_of_two(num_units, order):
    assert order_of(num_units) == order


def test_halves_that_are_freed_coalesce_in_any_order():
    buddy = BuddyAllocator(8)
    starts = [buddy.allocate(0) for _ in range(8)]
    assert starts == list(range(8))
    assert buddy.allocate(0) is None
    for start in (5, 2, 7, 0, 3, 6, 1):
        buddy.free(start)
    assert buddy.allocate(2) == 0  # 0 to 3
    assert buddy.allocate(2) is None  # 4 is still held
    buddy.free(4)
    assert buddy.allocate(2) == 4


def test_neighbours_that_are_no_buddies_do_not_coalesce():
    buddy = BuddyAllocator(8)
    starts = [buddy.allocate(1) for _ in range(4)]
    buddy.free(starts[1])
    buddy.free(starts[2])  # 2 to 5 are free, and 4 consecutive units cannot be had
    assert buddy.num_free == 4
    assert buddy.allocate(2) is None
    assert buddy.num_free_below(2) == 4


def test_the_smallest_chunk_that_does_is_split():
    buddy = BuddyAllocator(12)  # 8 and 4
    assert buddy.allocate(1) == 8
    assert buddy.allocate(3) == 0
    assert buddy.num_free_chunks(1) == 1
    assert buddy.num_free_chunks(0) == 2


@pytest.mark.parametrize("num_units", [1, 7, 12, 983])
def test_a_pool_of_any_size_holds_as_many_chunks_as_fit_side_by_side(num_units):
    for order in range(num_units.bit_length() + 1):
        buddy = BuddyAllocator(num_units)
        count = 0
        while buddy.allocate(order) is not None:
            count += 1
        assert count == buddy.capacity(order) == num_units // 2**order
        buddy.check_invariants()


def test_what_is_not_handed_out_cannot_be_freed():
    buddy = BuddyAllocator(8)
    start = buddy.allocate(1)
    with pytest.raises(KeyError, match="1"):
        buddy.free(start + 1)
    buddy.free(start)
    with pytest.raises(KeyError, match="0"):
        buddy.free(start)
    buddy.check_invariants()


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        BuddyAllocator(0)


class BuddyMachine(RuleBasedStateMachine):
    """Beside the allocator, who holds each unit: enough to say what it has to answer."""

    @initialize(num_units=st.integers(1, 40))
    def start(self, num_units: int):
        self.buddy = BuddyAllocator(num_units)
        self.holders: list[int | None] = [None] * num_units
        self.held: list[tuple[int, int]] = []  # (address, order)

    def free_ranges(self, order: int) -> int:
        """Aligned ranges of `2**order` units that nobody holds."""
        size = 2**order
        starts = range(0, len(self.holders) - size + 1, size)
        return sum(self.holders[start : start + size] == [None] * size for start in starts)

    @rule(order=st.sampled_from([0, 0, 1, 1, 2, 3, 5]))
    def allocate(self, order: int):
        start = self.buddy.allocate(order)
        assert (start is None) == (self.free_ranges(order) == 0)
        if start is not None:
            size = 2**order
            assert start % size == 0
            assert self.holders[start : start + size] == [None] * size
            self.holders[start : start + size] = [start] * size
            self.held.append((start, order))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 39))
    def free(self, index: int):
        start, order = self.held.pop(index % len(self.held))
        self.buddy.free(start)
        self.holders[start : start + 2**order] = [None] * 2**order

    @invariant()
    def counts_what_is_free(self):
        self.buddy.check_invariants()
        assert self.buddy.num_free == self.holders.count(None)
        for order in range(7):
            assert self.buddy.num_free_chunks(order) == self.free_ranges(order)
            usable = self.free_ranges(order) * 2**order
            assert self.buddy.num_free_below(order) == self.buddy.num_free - usable

    def teardown(self):
        if hasattr(self, "buddy"):
            while self.held:
                self.free(0)
            for order in range(7):
                assert self.buddy.num_free_chunks(order) == self.buddy.capacity(order)


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)
