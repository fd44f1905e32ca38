"""Scheduler: how sequences end, on their own or by abort, and that they leave nothing behind."""

from tests.scheduling.fakes import (
    EOS,
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


def end_of(tokens, **params):
    """(output, reason, stop reason) of a request whose model yields `tokens` one by one."""
    scheduler = make_scheduler()
    request = make_request("a", 3, **params)
    scheduler.add(request)
    executor = FakeExecutor(scheduler.memory, lambda seq: tokens[seq.num_output_tokens])
    run_to_end(scheduler, executor)
    (seq,) = request.sequences
    return seq.output_token_ids, seq.finish_reason, seq.stop_reason


def test_eos_ends_a_sequence():
    assert end_of([5, EOS, 6], max_tokens=9) == ([5, EOS], "stop", None)


def test_eos_is_ignored_on_demand():
    assert end_of([5, EOS, 6], max_tokens=3, ignore_eos=True) == ([5, EOS, 6], "length", None)


def test_a_stop_token_ends_a_sequence_and_is_named():
    assert end_of([5, 6, 7], stop_token_ids=[9, 6]) == ([5, 6], "stop", 6)


def test_eos_as_stop_token_is_named_where_eos_is_ignored():
    assert end_of([EOS], stop_token_ids=[EOS], ignore_eos=True) == ([EOS], "stop", EOS)


def test_max_tokens_ends_a_sequence():
    assert end_of([5, 6, 7], max_tokens=2) == ([5, 6], "length", None)
    assert end_of([5, 6, 7], max_tokens=1) == ([5], "length", None)


def test_a_stop_at_the_last_token_counts_as_stop():
    assert end_of([5, EOS], max_tokens=2) == ([5, EOS], "stop", None)


def test_a_stop_string_ends_a_sequence_whatever_else_its_token_does():
    for first, second, params in (
        (5, 6, {}),
        (5, 6, {"max_tokens": 2}),
        (5, EOS, {}),
        (5, 6, {"stop_token_ids": [6]}),
        (5, EOS, {"min_tokens": 9}),
    ):
        scheduler = make_scheduler()
        stopped, other = make_request("a", 3, **params), make_request("b", 3, max_tokens=9)
        scheduler.add(stopped)
        scheduler.add(other)
        scheduler.update(scheduler.schedule(), [first, 7])
        (seq,) = stopped.sequences
        assert scheduler.update(scheduler.schedule(), [second, 7], stops={seq.seq_id: "END"}) == [
            seq
        ]
        assert seq.output_token_ids == [first, second]
        assert (seq.finish_reason, seq.stop_reason) == ("stop", "END")
        assert outputs(other) == [([7, 7], None)]


def test_a_stop_string_may_end_a_sequence_with_its_first_token():
    scheduler = make_scheduler(max_num_seqs=2)
    request = make_request("a", 3, n=2, max_tokens=9)
    scheduler.add(request)
    stopped, other = request.sequences
    assert scheduler.update(scheduler.schedule(), [5, 6], stops={stopped.seq_id: "END"}) == [
        stopped
    ]
    assert outputs(request) == [([5], "stop"), ([6], None)]
    assert scheduler.schedule().decodes == [other]


def test_a_request_that_fails_before_the_update_gets_no_token():
    scheduler = make_scheduler()
    failed, other = make_request("a", 3), make_request("b", 3)
    scheduler.add(failed)
    scheduler.add(other)
    scheduler.update(scheduler.schedule(), [5, 5])
    batch = scheduler.schedule()
    scheduler.fail("a", "its text could not be decoded")
    assert scheduler.update(batch, [6, 6], stops={failed.sequences[0].seq_id: "END"}) == []
    assert outputs(failed) == [([5], "error")]
    assert outputs(other) == [([5, 6], None)]


def test_a_sequence_tells_beforehand_how_a_token_would_end_it():
    scheduler = make_scheduler()
    request = make_request("a", 3, min_tokens=2, max_tokens=3, stop_token_ids=[6])
    scheduler.add(request)
    (seq,) = request.sequences
    assert [seq.end_with(token) for token in (5, 6, EOS)] == [None, None, None]
    scheduler.update(scheduler.schedule(), [5])
    assert [seq.end_with(token) for token in (5, 6, EOS)] == [None, ("stop", 6), ("stop", None)]
    scheduler.update(scheduler.schedule(), [5])
    assert seq.end_with(5) == ("length", None)
    assert seq.end_with(6) == ("stop", 6)


def test_nothing_stops_before_min_tokens():
    assert end_of([EOS, 6, EOS, 5], min_tokens=3) == ([EOS, 6, EOS], "stop", None)
    assert end_of([6, 6, 5, 6], min_tokens=3, stop_token_ids=[6]) == ([6, 6, 5, 6], "stop", 6)


def test_a_sequence_at_the_model_limit_ends_there():
    scheduler = make_scheduler(max_model_len=8)
    request = make_request("a", 3, max_tokens=5)
    scheduler.add(request)
    run_to_end(scheduler, FakeExecutor(scheduler.memory, never_ends))
    assert request.sequences[0].num_tokens == 8


def test_blocks_are_free_in_the_step_that_ends_a_sequence():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 9, max_tokens=1))
    batch = scheduler.schedule()
    assert scheduler.memory.num_free_blocks == scheduler.memory.num_total_blocks - 3
    (ended,) = scheduler.update(batch, [5])
    assert ended.request.request_id == "a"
    assert scheduler.memory.num_free_blocks == scheduler.memory.num_total_blocks
    assert not scheduler.has_work
    assert scheduler.counters.num_finished == 1


def test_the_engine_may_finish_a_sequence_with_its_own_reason():
    scheduler = make_scheduler()
    request = make_request("a", 9)
    scheduler.add(request)
    run_step(scheduler, FakeExecutor(scheduler.memory, never_ends))
    (seq,) = request.sequences
    scheduler.finish(seq, "stop", "END")
    scheduler.finish(seq, "error")  # it has ended: nothing happens
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "END")
    assert scheduler.memory.num_free_blocks == scheduler.memory.num_total_blocks
    assert scheduler.counters.num_finished == 1


def test_a_waiting_request_can_be_aborted():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 4))
    scheduler.add(make_request("b", 4))
    run_step(scheduler, FakeExecutor(scheduler.memory, never_ends))
    (aborted,) = scheduler.abort("b")
    assert aborted.finish_reason == "abort"
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)


def test_a_request_in_mid_prefill_can_be_aborted():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 20))
    run_step(scheduler, FakeExecutor(scheduler.memory, never_ends))
    scheduler.abort("a")
    assert not scheduler.has_work
    assert scheduler.memory.num_free_blocks == scheduler.memory.num_total_blocks


def test_a_preempted_request_can_be_aborted():
    scheduler = make_scheduler(num_blocks=7, block_size=2)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "ab":
        scheduler.add(make_request(name, 3, max_tokens=6))
    while not scheduler.counters.num_preemptions:
        run_step(scheduler, executor)
    assert names(scheduler.abort("b")) == ["b"]
    run_to_end(scheduler, executor)
    assert scheduler.counters.num_finished == 2


def test_an_abort_ends_all_of_n_sequences_that_are_left():
    scheduler = make_scheduler(max_num_seqs=2)
    request = make_request("a", 4, n=3, max_tokens=5)
    scheduler.add(request)
    run_step(scheduler, FakeExecutor(scheduler.memory, never_ends))
    scheduler.finish(request.sequences[0], "stop", "END")
    assert scheduler.abort("a") == request.sequences[1:]
    assert [seq.finish_reason for seq in request.sequences] == ["stop", "abort", "abort"]
    assert not scheduler.has_work


def test_aborting_what_has_ended_or_never_was_does_nothing():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 4, max_tokens=1))
    run_to_end(scheduler, FakeExecutor(scheduler.memory, never_ends))
    assert scheduler.abort("a") == []
    assert scheduler.abort("nobody") == []


def test_results_for_what_ended_while_the_step_ran_are_passed_over():
    scheduler = make_scheduler()
    executor = FakeExecutor(scheduler.memory, never_ends)
    requests = [make_request(name, 4) for name in "abcd"]
    for request in requests[:2]:
        scheduler.add(request)
    run_step(scheduler, executor)
    for request in requests[2:]:
        scheduler.add(request)
    batch = scheduler.schedule()  # decodes a and b, prefills c and d
    sampled = executor.run(batch)
    scheduler.abort("a")
    scheduler.abort("c")
    assert scheduler.update(batch, sampled) == []
    assert [request.sequences[0].num_output_tokens for request in requests] == [1, 2, 0, 1]
    scheduler.memory.check_invariants()
    run_to_end(scheduler, executor)
    assert outputs(requests[3])[0][0] == [1 + (4 + i) % 7 for i in range(16)]


def test_an_iteration_whose_execution_failed_is_scheduled_again():
    scheduler = make_scheduler()
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 4))
    run_step(scheduler, executor)
    scheduler.add(make_request("b", 6))
    lost = scheduler.schedule()
    again = scheduler.schedule()
    assert names(again.decodes) == names(lost.decodes) == ["a"]
    assert chunks(again) == chunks(lost) == [("b", 0, 6)]
    scheduler.update(again, executor.run(again))
    scheduler.memory.check_invariants()
