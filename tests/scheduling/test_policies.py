"""Scheduler: in which order requests are served, under each policy."""

import math

import pytest

from paged_jax.scheduling.policies import (
    POLICIES,
    Policy,
    Priority,
    ShortestPromptFirst,
    make_policy,
    register,
)
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


def admitted(scheduler, requests) -> list[str]:
    """Add requests to a scheduler that runs one at a time; the order in which they start."""
    for request in requests:
        scheduler.add(request)
    batches = run_to_end(scheduler, FakeExecutor(scheduler.memory, never_ends))
    return [name for batch in batches for name, *_ in chunks(batch)]


def one_at_a_time(policy, **limits):
    return make_scheduler(policy=policy, max_num_seqs=1, **limits)


def test_first_come_first_served_goes_by_addition():
    requests = [
        make_request(name, 4, arrival=10.0 - i, priority=-i) for i, name in enumerate("abc")
    ]
    assert admitted(one_at_a_time("fcfs"), requests) == ["a", "b", "c"]


@pytest.mark.parametrize("key", [math.nan, None, "a", (1.0, None), (0.0, math.nan)], ids=str)
def test_a_key_that_nothing_can_be_sorted_by_refuses_the_request_alone(key):
    class Odd(Policy):
        def key(self, request):
            return key if request.request_id == "odd" else len(request.prompt_token_ids)

    scheduler = one_at_a_time(Odd())
    for request in (make_request("a", 4, max_tokens=3), make_request("b", 4, max_tokens=3)):
        scheduler.add(request)
    with pytest.raises(ValueError, match=r"request 'odd': policy Odd gives it the key .*numbers"):
        scheduler.add(make_request("odd", 4))
    assert admitted(scheduler, [make_request("c", 2, max_tokens=3)]) == ["c", "a", "b"]


def test_keys_may_be_numbers_and_tuples_in_one_policy():
    class Either(Policy):
        def key(self, request):
            return (1, -request.priority) if request.priority else 1

    requests = [make_request(name, 4, priority=i, max_tokens=3) for i, name in enumerate("abc")]
    assert admitted(one_at_a_time(Either()), requests) == ["a", "c", "b"]


def test_priority_goes_by_the_lower_number_then_by_arrival():
    requests = [
        make_request("late", 4, arrival=3.0),
        make_request("early", 4, arrival=2.0),
        make_request("urgent", 4, arrival=4.0, priority=-1),
        make_request("idle", 4, arrival=1.0, priority=1),
    ]
    expected = ["urgent", "early", "late", "idle"]
    assert admitted(one_at_a_time(Priority(ageing_s=10.0)), requests) == expected


def test_who_has_waited_long_goes_before_a_better_priority():
    requests = [
        make_request("old", 4, arrival=0.0, priority=1),
        make_request("too late", 4, arrival=60.1, priority=0),
        make_request("just in time", 4, arrival=59.9, priority=0),
    ]
    expected = ["just in time", "old", "too late"]
    assert admitted(one_at_a_time("priority"), requests) == expected


def test_nobody_starves_while_urgent_requests_keep_coming():
    """One that is served in each two seconds, and one urgent request a second: an overload."""
    scheduler = one_at_a_time(Priority(ageing_s=10.0))
    executor = FakeExecutor(scheduler.memory, never_ends)
    patient = make_request("patient", 4, max_tokens=2, priority=1)
    scheduler.add(patient)
    for second in range(60):
        scheduler.add(
            make_request(f"urgent {second}", 4, max_tokens=2, arrival=float(second), priority=0)
        )
        run_step(scheduler, executor)
        if patient.is_finished:
            break
    assert 10 < second < 30
    assert scheduler.num_waiting > 5


def test_shortest_prompt_first_goes_by_length_and_waiting():
    requests = [
        make_request("long", 20, arrival=0.0),
        make_request("short", 2, arrival=1.0),
        make_request("middle", 10, arrival=1.0),
        make_request("short, but later", 2, arrival=6.0),
    ]
    policy = ShortestPromptFirst(token_s=0.5)
    expected = ["short", "middle", "short, but later", "long"]
    assert admitted(one_at_a_time(policy), requests) == expected


def test_the_last_in_order_is_preempted_whenever_it_came():
    """The oldest of three has the worst priority; it comes back before a worse one that waits."""
    scheduler = make_scheduler(num_blocks=9, block_size=4, policy="priority", max_num_seqs=3)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        scheduler.add(make_request(name, 7, max_tokens=9, priority=priority))
    run_step(scheduler, executor)
    scheduler.add(make_request("d", 7, max_tokens=2, priority=3))
    scheduler.add(make_request("e", 7, max_tokens=2, priority=0))
    run_step(scheduler, executor)
    batch = run_step(scheduler, executor)
    assert (names(batch.preempted), names(batch.decodes)) == (["a"], ["b", "c"])
    batches = run_to_end(scheduler, executor)
    assert [name for batch in batches for name, *_ in chunks(batch)] == ["e", "a", "d"]


def test_a_static_batch_is_formed_when_nothing_runs_and_nobody_joins_it():
    scheduler = make_scheduler(policy="static", max_num_seqs=3)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for i, name in enumerate("abcde"):
        scheduler.add(make_request(name, 3, max_tokens=2 + i))
    batches = run_to_end(scheduler, executor)
    starts = {i: chunks(batch) for i, batch in enumerate(batches) if batch.prefills}
    assert starts == {
        0: [("a", 0, 3), ("b", 0, 3), ("c", 0, 3)],
        4: [("d", 0, 3), ("e", 0, 3)],  # c has four tokens by then
    }
    assert names(batches[3].decodes) == ["c"]


def test_a_static_batch_takes_as_many_as_fit_however_long_their_prefill():
    scheduler = make_scheduler(
        policy="static", max_num_seqs=4, max_num_batched_tokens=6, max_prefill_seqs=2
    )
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "abcde":
        scheduler.add(make_request(name, 5, max_tokens=2))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 5), ("b", 0, 1)]
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 1)
    assert chunks(run_step(scheduler, executor)) == [("b", 1, 4), ("c", 0, 1)]
    later = [chunks(batch) for batch in run_to_end(scheduler, executor)]
    assert later == [[("c", 1, 4), ("d", 0, 1)], [("d", 1, 4)], [], [("e", 0, 5)], []]


def test_a_static_batch_has_room_for_the_samples_of_those_it_takes():
    scheduler = make_scheduler(policy="static", max_num_seqs=5)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name, n in (("a", 3), ("b", 2), ("c", 2), ("d", 1)):
        scheduler.add(make_request(name, 3, n=n, max_tokens=3))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 3), ("b", 0, 3)]
    assert names(run_step(scheduler, executor).decodes) == ["a", "a", "a", "b", "b"]
    run_step(scheduler, executor)
    assert chunks(run_step(scheduler, executor)) == [("c", 0, 3), ("d", 0, 3)]


def test_the_preempted_of_a_static_batch_join_the_next_one():
    scheduler = make_scheduler(
        num_blocks=9, policy="static", preemption_mode="swap", num_swap_blocks=4
    )
    executor = FakeExecutor(scheduler.memory, never_ends)
    requests = [make_request(name, 7, max_tokens=9) for name in "abcde"]
    for request in requests[:4]:
        scheduler.add(request)
    while scheduler.counters.num_preemptions < 2:
        run_step(scheduler, executor)
    scheduler.add(requests[4])
    assert scheduler.num_swapped == 2
    while scheduler.num_running:
        batch = run_step(scheduler, executor)
        assert not batch.resumed
        assert not batch.prefills
    batch = run_step(scheduler, executor)
    assert (names(batch.resumed), chunks(batch)) == (["c", "d"], [("e", 0, 7)])
    run_to_end(scheduler, executor)
    assert [len(tokens) for request in requests for tokens, _ in outputs(request)] == [9] * 5


def test_a_researcher_adds_a_policy_by_name():
    @register("last_come_first_served")
    class LastComeFirstServed(Policy):
        def key(self, request):
            return -request.arrival_time

    try:
        requests = [make_request(name, 4, arrival=float(i)) for i, name in enumerate("abc")]
        assert admitted(one_at_a_time("last_come_first_served"), requests) == ["c", "b", "a"]
        with pytest.raises(ValueError, match="'last_come_first_served' is there already"):
            register("last_come_first_served")(LastComeFirstServed)
    finally:
        del POLICIES["last_come_first_served"]


def test_a_policy_that_admits_nobody_is_an_error_and_no_endless_loop():
    class Closed(Policy):
        def key(self, request):
            return 0.0

        def may_admit(self, num_running):
            return False

    scheduler = make_scheduler(policy=Closed())
    scheduler.add(make_request("a", 4))
    with pytest.raises(RuntimeError, match=r"nothing runs, and still .*'a'.* is not admitted"):
        scheduler.schedule()


def test_an_unknown_policy_is_refused_with_those_there_are():
    message = "'lifo' is unknown; choose one of fcfs, priority, shortest_prompt_first, static"
    with pytest.raises(ValueError, match=message):
        make_policy("lifo")


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_ageing_is_finite(seconds):
    with pytest.raises(ValueError, match=f"ageing_s .* got {seconds}"):
        Priority(ageing_s=seconds)
    with pytest.raises(ValueError, match=f"token_s .* got {seconds}"):
        ShortestPromptFirst(token_s=seconds)
