"""Scheduler: deadlines, failures and aborts in every state, a full queue, a lost step or cache."""

import math

import pytest

from paged_jax.scheduling.checks import QueueFull
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

STATES = ("waiting", "mid-prefill", "running", "preempted", "swapped", "one of n", "beams")


def brought_to(state: str, **arguments):
    """(scheduler, executor, victim, another) where the request "victim" is in that state.

    Another request is older than it and runs, unless the victim has not been admitted.
    """
    mode = "swap" if state in ("swapped", "one of n", "beams") else "recompute"
    scheduler = make_scheduler(
        num_blocks=10,
        block_size=2,
        max_num_seqs=5,
        max_num_batched_tokens=5,
        preemption_mode=mode,
        num_swap_blocks=20,
        enable_prefix_caching=True,
    )
    executor = FakeExecutor(scheduler.memory)
    other = make_request("other", 3, max_tokens=15, ignore_eos=True)
    params = {"max_tokens": 10, "ignore_eos": True}
    num_prompt = 9 if state == "mid-prefill" else 3
    if state == "one of n":
        params |= {"n": 2}
    if state == "beams":
        params |= {"beam_width": 2, "max_tokens": 6}
    victim = make_request("victim", num_prompt, seed=1, **params, **arguments)
    scheduler.add(other)
    run_step(scheduler, executor)
    scheduler.add(victim)

    def is_there() -> bool:
        seqs = victim.sequences
        if state == "waiting":
            return True
        if state == "mid-prefill":
            return 0 < seqs[0].num_computed_tokens < 9
        if state == "running":
            return seqs[0].num_output_tokens == 2
        if state == "preempted":
            return seqs[0].status is SequenceStatus.WAITING and not seqs[0].is_fresh
        if state == "swapped":
            return seqs[0].status is SequenceStatus.SWAPPED
        return len(seqs) == 2 and all(seq.num_output_tokens == 2 for seq in seqs)

    while not is_there():
        run_step(scheduler, executor)
    return scheduler, executor, victim, other


def check_end(scheduler, executor, victim, other, reason: str) -> None:
    """The victim has ended for that reason, and the other has its own output."""
    assert {seq.finish_reason for seq in victim.sequences} == {reason}
    scheduler.memory.check_invariants()
    run_to_end(scheduler, executor)
    memory = scheduler.memory
    assert memory.num_free_swap_blocks == memory.num_swap_blocks
    alone = make_request("alone", 3, max_tokens=15, ignore_eos=True)
    idle = make_scheduler()
    idle.add(alone)
    run_to_end(idle, FakeExecutor(idle.memory))
    assert outputs(other) == outputs(alone)


@pytest.mark.parametrize("state", STATES)
def test_a_request_ends_at_its_deadline_in_any_state(state):
    scheduler, executor, victim, other = brought_to(state, deadline_s=7.5)
    sequences = list(victim.sequences)
    assert scheduler.expire(7.4) == []
    assert scheduler.expire(7.5) == sequences
    assert scheduler.counters.num_timeouts == 1
    check_end(scheduler, executor, victim, other, "timeout")


@pytest.mark.parametrize("state", STATES)
def test_a_request_fails_alone_in_any_state(state):
    scheduler, executor, victim, other = brought_to(state)
    sequences = list(victim.sequences)
    assert scheduler.fail("victim", "logits are not finite") == sequences
    assert victim.error == "logits are not finite"
    check_end(scheduler, executor, victim, other, "error")
    assert other.error is None


@pytest.mark.parametrize("state", STATES)
def test_a_request_is_aborted_in_any_state(state):
    scheduler, executor, victim, other = brought_to(state)
    sequences = list(victim.sequences)
    assert scheduler.abort("victim") == sequences
    check_end(scheduler, executor, victim, other, "abort")


def test_nobody_finds_what_a_failed_request_has_computed():
    def num_cached(end) -> int:
        scheduler = make_scheduler(enable_prefix_caching=True)
        executor = FakeExecutor(scheduler.memory, never_ends)
        scheduler.add(make_request("a", 17, max_tokens=9))
        run_step(scheduler, executor)
        end(scheduler)
        later = make_request("b", 17, max_tokens=1)
        scheduler.add(later)
        run_to_end(scheduler, executor)
        return later.num_cached_tokens

    assert num_cached(lambda scheduler: scheduler.abort("a")) == 16
    assert num_cached(lambda scheduler: scheduler.fail("a", "not finite")) == 0


def test_failing_or_timing_out_what_has_ended_does_nothing():
    scheduler = make_scheduler()
    request = make_request("a", 4, max_tokens=1, deadline_s=1.0)
    scheduler.add(request)
    run_to_end(scheduler, FakeExecutor(scheduler.memory, never_ends))
    scheduler.add(make_request("a", 4, max_tokens=1, deadline_s=3.0))  # the same id again
    assert scheduler.expire(2.0) == []
    assert scheduler.fail("nobody", "a fault") == []
    assert (request.error, scheduler.counters.num_timeouts) == (None, 0)
    assert names(scheduler.expire(3.0)) == ["a"]


def test_deadlines_end_all_that_are_due_in_their_order():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, deadline_s in (("a", 3.0), ("b", 1.0), ("c", None), ("d", 2.0), ("e", 4.0)):
        scheduler.add(make_request(name, 4, deadline_s=deadline_s))
    assert names(scheduler.expire(3.0)) == ["b", "d", "a"]
    assert scheduler.num_waiting == 2


def test_candidates_that_are_no_numbers_fail_the_search_with_a_reason():
    scheduler = make_scheduler()
    executor = FakeExecutor(scheduler.memory)
    request = make_request("a", 4, beam_width=2)
    scheduler.add(request)
    run_step(scheduler, executor)
    batch = scheduler.schedule()
    rows = executor.logprobs(batch)
    nan = [(token, float("nan")) for token, _ in rows[0].top]
    rows[0] = type(rows[0])(rows[0].sampled, tuple(nan))
    ended = scheduler.update(batch, executor.run(batch), rows)
    assert [seq.finish_reason for seq in ended] == ["error"] * 2
    assert request.error == "beam search: a log-probability is NaN"
    assert not scheduler.has_work


def test_a_full_queue_refuses_requests_until_one_is_admitted():
    scheduler = make_scheduler(max_num_seqs=1, max_num_waiting=2)
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 4, max_tokens=2))
    scheduler.add(make_request("b", 4, n=3, max_tokens=1))  # counts once
    message = "request 'c': 2 requests wait, and max_num_waiting is 2; send it again later"
    with pytest.raises(QueueFull, match=message):
        scheduler.add(make_request("c", 4, max_tokens=1))
    assert scheduler.counters.num_refused == 1
    run_step(scheduler, executor)
    scheduler.add(make_request("c", 4, max_tokens=1))
    with pytest.raises(QueueFull):
        scheduler.add(make_request("d", 4, max_tokens=1))
    run_to_end(scheduler, executor)
    assert (scheduler.counters.num_refused, scheduler.counters.num_finished) == (2, 5)


def test_what_can_never_fit_counts_as_refused():
    scheduler = make_scheduler(max_model_len=16)
    with pytest.raises(ValueError, match="max_model_len 16"):
        scheduler.add(make_request("a", 16))
    assert scheduler.counters.num_refused == 1


def test_a_step_that_failed_is_planned_again_with_its_swaps():
    scheduler = make_scheduler(num_blocks=9, preemption_mode="swap", num_swap_blocks=8)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "abc":
        scheduler.add(make_request(name, 7, max_tokens=9))
    run_step(scheduler, executor)
    run_step(scheduler, executor)
    lost = scheduler.schedule()
    assert (names(lost.preempted), len(lost.swap_outs)) == (["c"], 2)
    scheduler.recover(cache_lost=False)
    again = scheduler.schedule()
    assert (names(again.decodes), again.preempted) == (names(lost.decodes), [])
    assert again.swap_outs == lost.swap_outs
    scheduler.update(again, executor.run(again))
    assert scheduler.counters.num_swapped_out_blocks == 2
    run_to_end(scheduler, executor)


def test_who_had_blocks_in_a_lost_cache_is_computed_again_and_the_swapped_are_not():
    scheduler = make_scheduler(
        num_blocks=11, preemption_mode="swap", num_swap_blocks=8, enable_prefix_caching=True
    )
    executor = FakeExecutor(scheduler.memory, never_ends)
    prefix = make_request("prefix", 4, prompt_seed=9, max_tokens=1)
    scheduler.add(prefix)
    run_to_end(scheduler, executor)
    assert scheduler.pin(prefix.prompt_token_ids, None) == 4
    for i, name in enumerate("abcd"):
        scheduler.add(make_request(name, 7, prompt_seed=i, max_tokens=9))
    while not scheduler.num_swapped:
        run_step(scheduler, executor)
    num_swapped = scheduler.num_swapped
    scheduler.schedule()
    executor.slots.clear()
    scheduler.recover(cache_lost=True)
    assert (scheduler.num_running, scheduler.num_swapped) == (0, num_swapped)
    assert scheduler.memory.num_pinned_blocks == 0
    assert scheduler.counters.num_preemptions == num_swapped
    (chunk, *_) = chunks(run_step(scheduler, executor))
    assert chunk == ("a", 0, 10)
    batches = run_to_end(scheduler, executor)
    assert sum(len(batch.resumed) for batch in batches) >= num_swapped
    assert scheduler.counters.num_finished == 5


def test_deadlines_of_requests_that_have_ended_do_not_pile_up():
    """Most requests end long before theirs, and some have none to reach."""
    scheduler = make_scheduler()
    scheduler.add(make_request("stays", 4, max_tokens=9, deadline_s=5000.0))
    for number in range(1000):
        scheduler.add(make_request(str(number), 4, deadline_s=math.inf))
        scheduler.abort(str(number))
    assert len(scheduler._unfinished._deadlines) < 30
    [seq] = scheduler.expire(5000.0)
    assert (seq.request.request_id, seq.finish_reason) == ("stays", "timeout")
    assert not scheduler.has_work
