"""Prefix cache: who finds whose blocks, and at what cost."""

import gc
import itertools
import time
from collections.abc import Callable

import pytest

from paged_jax.memory.block_manager import BlockManager
from paged_jax.memory.usage import MemoryUsage
from tests.memory.cached_requests import Requests


@pytest.mark.parametrize(("block_size", "num_shared"), [(16, 0), (4, 12), (1, 15), (15, 15)])
def test_prompts_that_share_15_tokens(block_size, num_shared):
    """The textbook case: no block of 16 is shared, three of 4 are."""
    requests = Requests(100, block_size)
    requests.run([*range(15), 100, *range(200, 220)])
    assert requests.run([*range(15), 101, *range(200, 220)]) == num_shared


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_same_prompt_again_leaves_one_token_to_compute(block_size, num_blocks):
    """Also where its length is a multiple of the block size: the last block is then computed."""
    requests = Requests(20, block_size)
    prompt = range(num_blocks * block_size)
    assert [requests.run(prompt) for _ in range(3)] == [0, *2 * [(num_blocks - 1) * block_size]]
    assert requests.run([*prompt, 7]) == num_blocks * block_size
    assert requests.manager.num_cached_blocks == num_blocks + (block_size == 1)


def test_hits_are_shared_blocks_and_take_none():
    requests = Requests(6, 4)
    first, _ = requests.admit(range(9))
    requests.compute(first)
    second, found = requests.admit(range(10))
    assert found == 8
    manager = requests.manager
    assert manager.block_table(second)[:2] == manager.block_table(first)[:2]
    assert manager.num_free_blocks == 2
    assert manager.usage({first: 9, second: 8}) == MemoryUsage(
        token_states=9, reserved=2, internal=5, external=0, free=8, shared=8
    )


def test_nothing_is_found_before_it_is_computed():
    requests = Requests(20, 4)
    first, _ = requests.admit(range(13))
    assert requests.admit(range(13))[1] == 0, "admitted in the same iteration"
    requests.compute(first, 7)
    assert requests.admit(range(13))[1] == 4, "only what is computed"
    requests.compute(first, 13)
    assert requests.admit(range(13))[1] == 12


def test_two_identical_prompts_in_one_iteration_leave_one_cached_copy():
    requests = Requests(20, 4)
    first, second = (requests.admit(range(13))[0] for _ in range(2))
    requests.compute(first)
    requests.compute(second)
    manager = requests.manager
    third, found = requests.admit(range(13))
    assert found == 12
    assert manager.block_table(third)[:3] == manager.block_table(first)[:3]
    for seq_id in (first, third, second):
        manager.free(seq_id)
        manager.check_invariants()
    assert manager.num_cached_blocks == 3
    assert requests.run(range(13)) == 12


def test_what_follows_a_block_computed_twice_is_found():
    """A second turn finds the first one's answer although both turns computed the prompt."""
    requests = Requests(20, 4)
    prompt = list(range(8))  # the second block is computed by each that comes
    requests.run(prompt)
    seq_id, found = requests.admit(prompt)
    assert found == 4
    requests.compute(seq_id)
    requests.tokens[seq_id] += [50, 51, 52, 53, 54]
    requests.manager.append(seq_id, 13)
    requests.compute(seq_id)
    assert requests.admit([*prompt, 50, 51, 52, 53, 60])[1] == 12


def test_generated_tokens_are_found_by_the_next_turn():
    requests = Requests(20, 4)
    seq_id, _ = requests.admit(range(6))
    tokens = requests.tokens[seq_id]
    for token in range(100, 107):
        requests.compute(seq_id)
        tokens.append(token)
        assert requests.manager.append(seq_id, len(tokens))
    requests.manager.free(seq_id)
    assert requests.run([*tokens, 7, 8, 9]) == 12


def test_a_different_salt_finds_nothing():
    requests = Requests(40, 4)
    requests.run(range(9), salt="a")
    assert requests.run(range(9), salt="b") == 0
    assert requests.run(range(9)) == 0
    assert requests.run(range(9), salt="a") == 8


def test_a_sequence_may_decline_the_cache_and_still_fill_it():
    """As one must whose prompt log-probabilities are asked for: it has to compute all of them."""
    requests = Requests(20, 4)
    requests.run(range(9))
    assert requests.run(range(9), use_cache=False) == 0
    assert requests.manager.num_cached_blocks == 2
    assert requests.run(range(20, 29), use_cache=False) == 0
    assert requests.run(range(20, 29)) == 8
    assert requests.manager.stats.queried_tokens == 18


class SaltOfOneHash:
    """Different from any other, with the same hash."""

    def __hash__(self):
        return 1


def test_equal_hashes_make_neither_tokens_nor_salts_equal():
    assert hash((-1,) * 4) == hash((-2,) * 4)  # in CPython
    requests = Requests(40, 4)
    requests.run([-1] * 9)
    assert requests.run([-2] * 9) == 0
    assert requests.run([-1] * 4 + [-2] * 5) == 4
    salts = SaltOfOneHash(), SaltOfOneHash()
    assert [requests.run([-1] * 9, salt=salt) for salt in (*salts, *salts)] == [0, 0, 8, 8]


def test_the_same_tokens_after_another_prefix_are_another_block():
    requests = Requests(20, 4)
    requests.run([1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert requests.run([2, 2, 2, 2, 5, 5, 5, 5, 9]) == 0
    assert requests.run([5, 5, 5, 5, 9]) == 0


def test_a_branch_that_ends_leaves_its_own_blocks_to_be_found():
    requests = Requests(20, 4)
    parent, _ = requests.admit(range(6))
    requests.compute(parent)
    child = 77
    requests.manager.fork(parent, child)
    requests.tokens[child] = [*range(6), 60, 61, 62]
    requests.tokens[parent] += [70, 71, 72]
    for seq_id in (parent, child):
        for num_tokens in (7, 8, 9):
            requests.manager.append(seq_id, num_tokens)
        requests.compute(seq_id)
    requests.manager.free(child)
    assert requests.admit([*range(6), 60, 61, 0])[1] == 8
    assert requests.admit([*range(6), 70, 71, 0])[1] == 8
    assert requests.admit([*range(6), 60, 71, 0])[1] == 4


def test_without_prefix_caching_only_what_is_held_is_found():
    requests = Requests(20, 4, enable_prefix_caching=False)
    manager = requests.manager
    first, _ = requests.admit(range(9), salt="request 0")
    requests.compute(first)
    sibling, found = requests.admit(range(9), salt="request 0")
    assert found == 8
    manager.free(first)
    assert requests.admit(range(9), salt="request 0")[1] == 8
    assert requests.admit(range(9), salt="request 1")[1] == 0
    for seq_id in (1, 2, 3):
        manager.free(seq_id)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (0, 20)
    assert requests.admit(range(9), salt="request 0")[1] == 0
    with pytest.raises(ValueError, match="prefix caching is off"):
        manager.pin(range(9))


def test_committing_what_cannot_be_computed_is_refused():
    requests = Requests(20, 4)
    seq_id, _ = requests.admit(range(9))
    with pytest.raises(ValueError, match="sequence 0: 12 tokens computed of 9"):
        requests.compute(seq_id, 12)
    requests.tokens[seq_id] += range(9, 16)
    with pytest.raises(ValueError, match="sequence 0: 16 tokens computed of 16, in 3 blocks"):
        requests.compute(seq_id)


def test_stats_count_tokens_looked_up_and_found():
    requests = Requests(20, 4)
    requests.run(range(10))
    requests.run(range(10))
    stats = requests.manager.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (20, 8)
    assert stats.hit_rate == pytest.approx(0.4)
    assert BlockManager(4, 4).stats.hit_rate == 0.0


def fastest_ms(action: Callable[[], None], repetitions: int) -> float:
    """Processor time of the fastest run, which a busy machine does not change."""
    times = []
    gc.collect()
    for _ in range(repetitions):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def test_a_prompt_of_32k_tokens_costs_less_than_10_ms():
    """To commit and to find; and hardly anything while it waits."""
    prompt = [(i * 7919) % 100_003 for i in range(2**15 + 1)]
    manager = BlockManager(1 + 12 * 2048, 16)
    ids = itertools.count()

    def commit():
        seq_id = next(ids)
        assert manager.allocate(seq_id, prompt, salt=seq_id, max_num_tokens=2**16) == 0
        manager.commit_full_blocks(seq_id, prompt, 2**15)

    def find():
        seq_id = next(ids)
        assert manager.allocate(seq_id, prompt, salt=0, max_num_tokens=2**16) == 2**15
        manager.commit_full_blocks(seq_id, prompt, 2**15)
        manager.free(seq_id)

    assert fastest_ms(commit, 5) < 10
    assert fastest_ms(find, 5) < 10
    manager.allocate(next(ids), [1] * 16 * manager.num_free_blocks, max_num_tokens=0)
    waiting = next(ids)

    def wait():
        """All but one block is found, and none is free."""
        assert manager.allocate(waiting, prompt, salt=0, max_num_tokens=2**16) is None

    assert fastest_ms(wait, 20) < 0.5
