"""Scheduler: preemption of groups, by recompute and by swap, and what becomes of the preempted."""

from types import SimpleNamespace

import pytest

from paged_jax.memory.block_manager import BlockManager
from paged_jax.scheduling.estimates import StepEstimates
from paged_jax.scheduling.request import SequenceStatus
from tests.scheduling.fakes import (
    FakeExecutor,
    chunks,
    make_request,
    make_scheduler,
    names,
    never_ends,
    outputs,
    run_step,
    run_to_end,
)


def alone(*args, **params):
    """The outputs of a request that has the pool to itself."""
    request = make_request("alone", *args, **params)
    scheduler = make_scheduler()
    scheduler.add(request)
    run_to_end(scheduler, FakeExecutor(scheduler.memory))
    return outputs(request)


@pytest.mark.parametrize(
    ("mode", "num_swap_blocks", "is_swapped"),
    [
        ("recompute", 8, False),
        ("auto", 8, False),  # nothing has been measured
        ("swap", 0, False),
        ("swap", 1, False),  # the victim holds two
        ("swap", 2, True),
        ("swap", 8, True),
    ],
)
def test_three_sequences_cross_a_border_with_two_free_blocks(mode, num_swap_blocks, is_swapped):
    """The paper's textbook case: exactly one is preempted, and its output does not change."""
    params = {"max_tokens": 9, "ignore_eos": True}
    requests = [make_request(name, 7, seed=i, **params) for i, name in enumerate("abc")]
    scheduler = make_scheduler(
        num_blocks=9, block_size=4, preemption_mode=mode, num_swap_blocks=num_swap_blocks
    )  # 3 x 2 blocks, 2 free
    executor = FakeExecutor(scheduler.memory)
    for request in requests:
        scheduler.add(request)
    run_step(scheduler, executor)  # prefill; each ends with 8 tokens
    run_step(scheduler, executor)  # the eighth token fills the second block
    batch = run_step(scheduler, executor)
    assert names(batch.preempted) == ["c"]
    assert names(batch.decodes) == ["a", "b"]
    (victim,) = requests[2].sequences
    assert scheduler.counters.num_preemptions == 1
    assert scheduler.counters.num_preemptions_by_swap == is_swapped
    assert scheduler.counters.num_recomputed_tokens == (0 if is_swapped else 8)
    assert scheduler.counters.num_swap_fallbacks == (mode == "swap" and not is_swapped)
    assert victim.num_computed_tokens == (8 if is_swapped else 0)
    assert (scheduler.num_swapped, scheduler.num_waiting) == ((1, 0) if is_swapped else (0, 1))
    assert len(batch.swap_outs) == scheduler.counters.num_swapped_out_blocks == 2 * is_swapped
    batches = run_to_end(scheduler, executor)
    assert [seq for batch in batches for seq in batch.resumed] == [victim] * is_swapped
    assert scheduler.counters.num_swapped_in_blocks == 2 * is_swapped
    prefills = [chunk for batch in batches for chunk in chunks(batch)]
    assert prefills == ([] if is_swapped else [("c", 0, 9)])
    for i, request in enumerate(requests):
        assert outputs(request) == alone(7, seed=i, **params)


def test_the_swapped_decode_in_the_iteration_that_resumes_them():
    scheduler = make_scheduler(
        num_blocks=9, block_size=4, preemption_mode="swap", num_swap_blocks=8
    )
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "abc":
        scheduler.add(make_request(name, 7, max_tokens=8))
    while not scheduler.num_swapped:
        run_step(scheduler, executor)
    while scheduler.num_swapped:
        batch = run_step(scheduler, executor)
        assert not (batch.swap_outs and batch.swap_ins)
    assert names(batch.resumed) == ["c"]
    assert "c" in names(batch.decodes)


def test_the_swapped_are_not_overtaken():
    scheduler = make_scheduler(num_blocks=10, preemption_mode="swap", num_swap_blocks=8)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "abc":
        scheduler.add(make_request(name, 7, max_tokens=9))
    while not scheduler.num_swapped:
        run_step(scheduler, executor)
    scheduler.add(make_request("small", 1, max_tokens=1))
    while scheduler.num_swapped:
        assert scheduler.memory.num_free_blocks > 0
        batch = run_step(scheduler, executor)
        assert names(batch.resumed) == ["c"] * (not scheduler.num_swapped)
        assert bool(batch.prefills) <= bool(batch.resumed)
    run_to_end(scheduler, executor)


def test_beams_that_wait_behind_another_request_give_up_their_blocks_to_it():
    """One of two beams has been computed again when a more urgent request comes: no more fits."""
    scheduler = make_scheduler(num_blocks=11, block_size=2, policy="priority")
    executor = FakeExecutor(scheduler.memory)
    params = {"beam_width": 2, "max_tokens": 6, "ignore_eos": True}
    search = make_request("search", 5, seed=1, priority=1, **params)
    first = make_request("first", 4, max_tokens=14, ignore_eos=True)
    scheduler.add(search)
    run_step(scheduler, executor)
    scheduler.add(first)
    while not scheduler.counters.num_preemptions:
        run_step(scheduler, executor)
    scheduler.abort("first")
    run_step(scheduler, executor)
    assert [seq.candidates is None for seq in search.sequences] == [False, True]
    scheduler.add(make_request("urgent", 18, priority=-1, max_tokens=1))
    batch = run_step(scheduler, executor)
    assert (batch.preempted, chunks(batch)) == ([search.sequences[0]], [("urgent", 0, 18)])
    assert [seq.candidates for seq in search.sequences] == [None, None], "to be found again"
    run_to_end(scheduler, executor)
    assert outputs(search) == alone(5, seed=1, **params)


def test_as_many_are_resumed_at_once_as_have_blocks_to_grow_into():
    scheduler = make_scheduler(
        num_blocks=12, block_size=1, preemption_mode="swap", num_swap_blocks=20
    )
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 3, max_tokens=8))
    for name in "bcd":
        scheduler.add(make_request(name, 1, max_tokens=6))
    while scheduler.num_swapped < 3:
        run_step(scheduler, executor)
    scheduler.abort("a")
    batch = run_step(scheduler, executor)
    assert (names(batch.resumed), batch.preempted) == (["b", "c"], [])
    run_to_end(scheduler, executor)


def test_all_samples_of_a_request_are_preempted_together_and_resumed_together():
    scheduler = make_scheduler(
        num_blocks=11, block_size=4, preemption_mode="swap", num_swap_blocks=10
    )
    executor = FakeExecutor(scheduler.memory)
    first = make_request("a", 4, max_tokens=24, ignore_eos=True)
    second = make_request("b", 6, seed=1, n=3, max_tokens=12, ignore_eos=True)
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.counters.num_preemptions:
        batch = run_step(scheduler, executor)
    assert set(batch.preempted) == set(second.sequences)
    assert all(seq.status is SequenceStatus.SWAPPED for seq in second.sequences)
    assert second.num_preemptions == scheduler.counters.num_preemptions == 1
    # They share the prompt's full block, which moves once.
    num_blocks = {-(-seq.num_computed_tokens // 4) for seq in second.sequences}
    assert len(batch.swap_outs) == 1 + 3 * (num_blocks.pop() - 1)
    while scheduler.num_swapped:
        batch = run_step(scheduler, executor)
    assert batch.resumed == second.sequences
    run_to_end(scheduler, executor)
    assert outputs(second) == alone(6, seed=1, n=3, max_tokens=12, ignore_eos=True)


def test_a_search_goes_on_from_where_it_was_swapped_out():
    scheduler = make_scheduler(
        num_blocks=13, block_size=2, preemption_mode="swap", num_swap_blocks=20
    )
    executor = FakeExecutor(scheduler.memory)
    params = {"beam_width": 2, "max_tokens": 10, "ignore_eos": True}
    first = make_request("a", 3, max_tokens=16, ignore_eos=True)
    search = make_request("b", 5, seed=1, **params)
    scheduler.add(first)
    scheduler.add(search)
    while not scheduler.counters.num_preemptions:
        run_step(scheduler, executor)
    assert [seq.status for seq in search.sequences] == [SequenceStatus.SWAPPED] * 2
    assert search.beam_search.num_tokens > 0
    run_to_end(scheduler, executor)
    assert scheduler.counters.num_recomputed_tokens == 0
    assert outputs(search) == alone(5, seed=1, **params)


def test_a_prompt_in_mid_prefill_goes_on_from_where_it_was_swapped_out():
    scheduler = make_scheduler(
        num_blocks=7,
        block_size=2,
        max_num_seqs=2,
        max_num_batched_tokens=2,
        preemption_mode="swap",
        num_swap_blocks=9,
    )
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 2, max_tokens=6))
    scheduler.add(make_request("b", 8, max_tokens=2, n=2))
    for _ in range(4):
        batch = run_step(scheduler, executor)
    assert (names(batch.decodes), names(batch.preempted)) == (["a"], ["b"])
    starts = [chunk for batch in run_to_end(scheduler, executor) for chunk in chunks(batch)]
    assert starts[0] == ("b", 2, 2)
    assert scheduler.counters.num_recomputed_tokens == 0


def test_what_has_computed_nothing_is_not_swapped():
    memory = BlockManager(17, 2, enable_prefix_caching=False, num_swap_blocks=9)
    scheduler = make_scheduler(
        memory=memory, preemption_mode="swap", max_num_batched_tokens=8, prefill_sizes=(2, 8)
    )
    executor = FakeExecutor(memory, never_ends)
    scheduler.add(make_request("a", 1, max_tokens=30))
    run_step(scheduler, executor)
    scheduler.add(make_request("b", 2, max_tokens=2))
    scheduler.add(make_request("c", 3, max_tokens=2))
    run_step(scheduler, executor)
    assert scheduler.queues.prefilling[0].num_computed_tokens == 0, "cut away to save padding"
    memory.append = lambda seq_id, num_tokens: scheduler.counters.num_preemptions > 0
    scheduler.queues.decoding[0].num_writable_slots = 0
    batch = scheduler.schedule()
    assert names(batch.preempted) == ["c"]
    assert (scheduler.counters.num_preemptions_by_swap, scheduler.counters.num_swap_fallbacks) == (
        0,
        0,
    )


def test_samples_that_do_not_fit_side_by_side_run_one_after_the_other():
    """Nobody else is left to preempt: the last sample gives way to its siblings, by recompute."""
    params = {"n": 3, "max_tokens": 14, "ignore_eos": True}
    scheduler = make_scheduler(
        num_blocks=6, block_size=4, preemption_mode="swap", num_swap_blocks=20
    )
    executor = FakeExecutor(scheduler.memory)
    request = make_request("a", 6, **params)  # 5 blocks for each: all there are
    scheduler.add(request)
    run_to_end(scheduler, executor)
    assert outputs(request) == alone(6, **params)
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.counters.num_preemptions_by_swap == 0


def test_what_can_no_longer_come_back_as_it_was_is_recomputed():
    """Blocks have been pinned since: three samples do not fit side by side any more."""
    scheduler = make_scheduler(
        num_blocks=14,
        block_size=4,
        preemption_mode="swap",
        num_swap_blocks=20,
        enable_prefix_caching=True,
    )
    executor = FakeExecutor(scheduler.memory)
    params = {"n": 3, "max_tokens": 12, "ignore_eos": True}
    first = make_request("a", 24, prompt_seed=1, max_tokens=9, ignore_eos=True)
    second = make_request("b", 6, prompt_seed=2, **params)
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.num_swapped:
        run_step(scheduler, executor)
    scheduler.abort("a")
    assert scheduler.pin(first.prompt_token_ids, None) == 24  # 6 of 13 blocks
    batch = run_step(scheduler, executor)
    assert [name for name, *_ in chunks(batch)] == ["b"]
    assert (scheduler.num_swapped, scheduler.counters.num_swap_fallbacks) == (0, 1)
    assert scheduler.memory.num_free_swap_blocks == 20
    run_to_end(scheduler, executor)
    assert outputs(second) == alone(6, prompt_seed=2, **params)


def test_each_preemption_of_a_request_makes_it_leave_more_blocks_free():
    denied = set()

    class Denying(BlockManager):
        kept = 0

        def allocate(self, seq_id, token_ids, **limits):
            self.kept = limits["keep_free_blocks"]
            return super().allocate(seq_id, token_ids, **limits)

        def append(self, seq_id, num_tokens):
            return seq_id not in denied and super().append(seq_id, num_tokens)

    memory = Denying(65, 1, enable_prefix_caching=False)
    scheduler = make_scheduler(memory=memory, watermark=2 / 64)
    executor = FakeExecutor(memory, never_ends)
    first = make_request("a", 1, max_tokens=40)
    scheduler.add(first)
    scheduler.add(make_request("b", 1, max_tokens=20))
    kept = []
    for _ in range(4):
        while scheduler.num_running < 2:
            run_step(scheduler, executor)
        kept.append(memory.kept)
        denied.add(first.sequences[0].seq_id)
        make_room = scheduler._preemption.make_room

        def allow(make_room=make_room):
            denied.clear()
            return make_room()

        scheduler._preemption.make_room = allow
        run_step(scheduler, executor)
        scheduler._preemption.make_room = make_room
    assert kept == [2, 2 + 1, 2 + 3, 2 + 7]
    run_to_end(scheduler, executor)


def times(device_s: float, swap_s: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(device_s=device_s, swap_s=swap_s)


@pytest.mark.parametrize(
    ("token_s", "block_s", "is_swapped"),
    [
        (1.0, 1.0, True),  # 8 s of prefill against 2 x 2 blocks
        (1.0, 1.9, True),
        (1.0, 2.1, False),
        (0.1, 1.0, False),
        (1.0, None, True),  # to find out
        (None, 1.0, False),
    ],
)
def test_auto_chooses_what_is_estimated_to_be_faster(token_s, block_s, is_swapped):
    estimates = StepEstimates()
    scheduler = make_scheduler(
        num_blocks=9, preemption_mode="auto", num_swap_blocks=8, estimates=estimates
    )
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "abc":
        scheduler.add(make_request(name, 7))
    batch = run_step(scheduler, executor)
    if token_s is not None:
        estimates.observe(batch, times(batch.num_prefill_tokens * token_s))
    if block_s is not None:
        batch.swap_outs, batch.prefills = [(1, 1)], []
        estimates.observe(batch, times(block_s, block_s))
    while not scheduler.counters.num_preemptions:
        run_step(scheduler, executor)
    assert scheduler.counters.num_preemptions_by_swap == is_swapped
    run_to_end(scheduler, executor)


def test_auto_without_a_host_pool_recomputes_and_calls_that_no_fallback():
    estimates = StepEstimates()
    scheduler = make_scheduler(num_blocks=9, preemption_mode="auto", estimates=estimates)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "abc":
        scheduler.add(make_request(name, 7))
    estimates.observe(run_step(scheduler, executor), times(9.0))
    run_to_end(scheduler, executor)
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.counters.num_swap_fallbacks == 0


def test_the_preemption_mode_is_one_of_three():
    with pytest.raises(ValueError, match="must be one of recompute, swap, auto, got 'drop'"):
        make_scheduler(preemption_mode="drop")
