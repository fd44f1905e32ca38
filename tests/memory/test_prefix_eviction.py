"""Cached prefixes under pressure: who is evicted, who waits, and what a pin holds."""

import pytest

from tests.memory.cached_requests import Requests


def test_the_least_recently_used_prefix_is_evicted_leaves_first():
    requests = Requests(6, 4)
    old, new = list(range(9)), list(range(100, 109))
    requests.run(old)
    requests.run(new)
    requests.run(old)  # used again
    manager = requests.manager
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (4, 6)
    other, found = requests.admit(range(200, 212))
    assert (found, manager.stats.evictions) == (0, 1)
    manager.free(other)  # never computed, so nothing to cache
    assert manager.num_cached_blocks == 3
    assert requests.admit(new)[1] == 4, "its leaf is gone, its first block is not"
    assert requests.admit(old)[1] == 8


def test_free_blocks_are_taken_before_any_is_evicted():
    requests = Requests(6, 4)
    requests.run(range(9))
    requests.admit(range(100, 116))
    assert requests.manager.stats.evictions == 0
    assert requests.manager.num_cached_blocks == 2


def test_a_sequence_never_evicts_what_it_has_found():
    requests = Requests(4, 4)
    requests.run(range(13))
    seq_id, found = requests.admit(range(16))
    assert found == 12
    assert requests.manager.num_free_blocks == 0
    requests.compute(seq_id)


def test_admission_counts_hits_in_use_as_taken_and_cached_ones_as_free():
    requests = Requests(4, 4)
    first, _ = requests.admit(range(9))
    requests.compute(first)
    assert requests.admit(range(17))[1] is None, "two hits and three more, one is free"
    seq_id, found = requests.admit(range(12))
    assert found == 8
    manager = requests.manager
    manager.free(seq_id)
    manager.free(first)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (2, 4)
    assert requests.admit(range(17))[1] is None, "two hits are cached and count as free: 5 > 4"
    assert requests.admit(range(16), keep_free_blocks=1)[1] is None
    assert manager.num_cached_blocks == 2, "a refusal changes nothing"
    assert requests.admit(range(16))[1] == 8


def test_a_prefix_evicted_while_its_request_waits_is_computed_again():
    requests = Requests(5, 4)
    waiting = list(range(17))
    requests.run(waiting[:13])
    manager = requests.manager
    blocker, _ = requests.admit(range(100, 107))

    def retry() -> int | None:
        return manager.allocate(99, waiting, max_num_tokens=17)

    assert retry() is None  # it found 12 tokens, and needs two blocks where none is free
    grown, _ = requests.admit(range(200, 206))
    assert manager.stats.evictions == 2
    assert retry() is None
    manager.free(blocker)
    manager.free(grown)
    assert retry() == 4, "two of its blocks are gone"


def test_a_request_that_waits_finds_what_was_committed_meanwhile():
    requests = Requests(8, 4)
    first, _ = requests.admit(range(17))
    manager = requests.manager
    requests.compute(first, 4)
    waiting = [*range(16), *range(30, 47)]
    assert manager.allocate(99, waiting, max_num_tokens=40) is None
    requests.compute(first)
    assert manager.allocate(99, waiting, max_num_tokens=40) is None
    manager.free(first)
    assert manager.allocate(99, waiting[:20], max_num_tokens=40) == 16


def test_a_preempted_sequence_finds_what_was_not_evicted_meanwhile():
    requests = Requests(6, 4)
    seq_id, _ = requests.admit(range(17))
    requests.compute(seq_id)
    manager = requests.manager
    manager.free(seq_id)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (4, 6)
    other, _ = requests.admit(range(100, 116))
    manager.free(other)
    assert manager.stats.evictions == 2
    assert manager.allocate(seq_id, requests.tokens[seq_id], max_num_tokens=20) == 8


def test_caching_keeps_no_more_contents_than_blocks():
    """Whatever the number of prompts and salts."""
    requests = Requests(8, 2)
    for i in range(500):
        requests.run([i, i + 1, i + 2, i + 3, 0], salt=i % 50)
    cache = requests.manager._cache
    assert len(cache._nodes) == len(cache._node_of_block) <= 8


def test_pinned_prefixes_outlive_any_pressure_until_they_are_unpinned():
    requests = Requests(4, 4)
    manager = requests.manager
    system = list(range(10))
    assert manager.pin(system) == 0
    requests.run(system)
    assert manager.pin(system) == 8
    assert (manager.num_pinned_blocks, manager.num_free_blocks) == (2, 2)
    for first in range(100, 200, 10):
        requests.run(range(first, first + 8))
    assert requests.run([*system[:8], 55]) == 8
    usage = manager.usage({})
    assert (usage.token_states, usage.free, usage.shared) == (8, 8, 0)
    manager.unpin(system)
    assert (manager.num_pinned_blocks, manager.num_free_blocks) == (0, 4)
    requests.run(range(300, 316))
    assert requests.run([*system[:8], 55]) == 0
    with pytest.raises(KeyError):
        manager.unpin(system)


def test_pins_overlap_and_keep_to_their_salt():
    requests = Requests(20, 4)
    manager = requests.manager
    requests.run(range(13))
    assert [manager.pin(range(9)) for _ in range(2)] == [8, 8], "a second time changes nothing"
    manager.check_invariants()
    assert manager.pin(range(13)) == 12
    assert manager.pin(range(9), "tenant") == 0
    assert manager.num_pinned_blocks == 3
    manager.unpin(range(9))
    assert manager.num_pinned_blocks == 3
    manager.unpin(range(13))
    assert manager.num_pinned_blocks == 0
    manager.check_invariants()


def test_what_is_pinned_of_a_prompt():
    requests = Requests(20, 4)
    manager = requests.manager
    requests.run(range(16))
    assert manager.num_pinned_tokens(range(16)) == 0
    manager.pin(range(10))
    assert manager.num_pinned_tokens(range(16)) == manager.num_pinned_tokens(range(9)) == 8
    assert manager.num_pinned_tokens(range(8)) == 4, "one token has to be computed"
    assert manager.num_pinned_tokens([*range(7), 0, 0, 0]) == 4
    assert manager.num_pinned_tokens([0, 0, *range(10)]) == 0
    assert manager.num_pinned_tokens(range(16), "tenant") == 0
    manager.unpin(range(10))
    assert manager.num_pinned_tokens(range(16)) == 0


def test_a_pin_that_leaves_too_little_changes_nothing():
    requests = Requests(5, 4)
    manager = requests.manager
    requests.run(range(8))
    assert manager.pin(range(16), leave_blocks=3) == 8
    requests.run(range(16))
    assert manager.pin(range(16), leave_blocks=2) is None
    assert manager.pin(range(12), leave_blocks=3) is None
    assert manager.num_pinned_blocks == 2, "what was pinned before is so still"
    assert manager.pin(range(9), leave_blocks=3) == 8, "it holds no more blocks than that"
    assert manager.pin(range(16), leave_blocks=1) == 16
    manager.unpin(range(9))
    manager.unpin(range(16))
    with pytest.raises(KeyError):
        manager.unpin(range(12))
    manager.check_invariants()
