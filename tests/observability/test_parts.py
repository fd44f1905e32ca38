"""The parts of observability that need no engine."""

import json
from types import SimpleNamespace

import pytest

from paged_jax.observability.chrome_trace import Lanes, TraceFile
from paged_jax.observability.families import Histogram, counters, flat, gauge, histogram, up_to
from paged_jax.observability.metrics import TokenGaps
from paged_jax.observability.phases import RequestPhases
from paged_jax.scheduling.batch import PrefillChunk, ScheduledBatch
from paged_jax.scheduling.request import SequenceStatus
from tests.observability.trace_checks import read_trace, spans
from tests.scheduling.fakes import make_request

# Histograms and figures


def test_a_histogram_counts_values_up_to_each_bound():
    values = Histogram((1, 2, 5))
    values.observe(1)
    values.observe(1.5, count=3)
    values.observe(100)
    assert values.cumulative() == [1, 4, 4, 5]
    assert values.sum == pytest.approx(105.5)


def test_bounds_of_lengths_end_at_the_longest():
    assert up_to(64) == (1, 2, 5, 10, 20, 50)
    assert up_to(100) == (1, 2, 5, 10, 20, 50, 100)


def test_figures_are_called_as_prometheus_prints_them():
    values = Histogram((0.5,))
    values.observe(0.25)
    figures = flat(
        [
            gauge("g", "", 3),
            counters("c", "", "why", {"this": 1, "that": 2}),
            histogram("h", "", values),
        ]
    )
    assert figures == {
        "g": 3,
        'c_total{why="this"}': 1,
        'c_total{why="that"}': 2,
        'h_bucket{le="0.5"}': 1,
        'h_bucket{le="+Inf"}': 1,
        "h_count": 1,
        "h_sum": 0.25,
    }


# Times between tokens


def sequences(count: int, **params) -> list:
    return [make_request(str(i), 4, **params).sequences[0] for i in range(count)]


def test_the_first_token_has_no_gap_and_all_later_ones_have():
    a, b = sequences(2)
    gaps = TokenGaps()
    assert gaps.after([a], 1.0) == []
    assert gaps.after([a, b], 1.5) == [(0.5, 1)]
    assert gaps.after([a, b], 1.75) == [(0.25, 2)]


def test_a_sequence_that_was_passed_over_has_a_longer_gap():
    a, b = sequences(2)
    gaps = TokenGaps()
    gaps.after([a, b], 1.0)
    assert gaps.after([a], 2.0) == [(1.0, 1)]
    assert sorted(gaps.after([a, b], 4.0)) == [(2.0, 1), (3.0, 1)]
    assert gaps.after([], 5.0) == []
    assert gaps.after([a, b], 6.0) == [(2.0, 1), (2.0, 1)]


def test_what_has_ended_is_forgotten():
    a, b = sequences(2)
    gaps = TokenGaps()
    gaps.after([a, b], 1.0)
    b.status = SequenceStatus.FINISHED
    gaps.after([a], 2.0)
    gaps.after([], 3.0)  # remembers a alone
    assert list(gaps._last_s) == [a]
    gaps.forget(a.request)
    assert not gaps._last_s


def test_the_beams_of_a_search_count_as_one():
    request = make_request("r", 4, beam_width=2)
    first = request.sequences[0]
    gaps = TokenGaps()
    gaps.after([first], 1.0)
    assert gaps.after([first, first.branch()], 2.0) == [(1.0, 1)]
    assert gaps.after([first.branch(), first.branch()], 4.0) == [(2.0, 1)]


# Phases


def iteration(
    start_s: float, end_s: float, *, prefills=(), preempted=(), resumed=(), finished=(), decodes=()
):
    batch = ScheduledBatch(list(prefills), list(decodes), list(preempted), resumed=list(resumed))
    return SimpleNamespace(batch=batch, start_s=start_s, end_s=end_s, finished=list(finished))


def chunk(seq, start: int, num_tokens: int) -> PrefillChunk:
    seq.status = SequenceStatus.RUNNING
    return PrefillChunk(seq, start, num_tokens)


@pytest.fixture
def followed():
    """(phases, what they reported): (request, from, to, time)."""
    changes: list[tuple] = []
    phases = RequestPhases(
        lambda request, before, phase, time: changes.append(
            (request.request_id, before, phase, time)
        )
    )
    return phases, changes


def test_a_request_goes_through_its_phases_and_back(followed):
    phases, changes = followed
    request = make_request("r", 8, arrival=1.0)
    [seq] = request.sequences
    phases.add(request)
    phases.follow(iteration(2.0, 3.0, prefills=[chunk(seq, 0, 4)]))
    assert phases.num_requests == {"waiting": 0, "prefill": 1, "running": 0, "swapped": 0}
    phases.follow(iteration(3.0, 4.0, prefills=[chunk(seq, 4, 4)]))
    seq.status = SequenceStatus.SWAPPED
    phases.follow(iteration(4.0, 5.0, preempted=[seq]))
    seq.status = SequenceStatus.RUNNING
    seq.token_ids.append(7)
    seq.num_computed_tokens = 8
    phases.follow(iteration(5.0, 6.0, resumed=[seq]))
    seq.status = SequenceStatus.WAITING
    phases.follow(iteration(6.0, 7.0, preempted=[seq]))
    phases.follow(iteration(7.0, 8.0, prefills=[chunk(seq, 0, 9)]))
    assert changes == [
        ("r", None, "waiting", 1.0),
        ("r", "waiting", "prefill", 2.0),
        ("r", "prefill", "running", 4.0),
        ("r", "running", "swapped", 4.0),
        ("r", "swapped", "running", 5.0),
        ("r", "running", "waiting", 6.0),
        ("r", "waiting", "prefill", 7.0),
        ("r", "prefill", "running", 8.0),
    ]
    assert phases.end("r", 9.0) == (request, 9.0)
    assert not phases.requests
    assert not any(phases.num_requests.values())


def test_times_of_a_request_never_decrease(followed):
    """As where the host plans an iteration while the one before still runs."""
    phases, changes = followed
    request = make_request("r", 4, arrival=1.0)
    [seq] = request.sequences
    phases.add(request)
    phases.follow(iteration(2.0, 5.0, prefills=[chunk(seq, 0, 4)]))
    seq.status = SequenceStatus.WAITING
    phases.follow(iteration(4.0, 6.0, preempted=[seq]))
    assert changes[-1] == ("r", "running", "waiting", 5.0)
    assert phases.end("r", 4.5) == (request, 5.0)


def test_a_request_runs_as_long_as_one_of_its_sequences_does(followed):
    phases, changes = followed
    request = make_request("r", 4, n=2)
    first, second = request.sequences
    phases.add(request)
    phases.follow(iteration(1.0, 2.0, prefills=[chunk(first, 0, 4)]))
    phases.follow(iteration(2.0, 3.0, prefills=[chunk(second, 0, 2)], decodes=[first]))
    assert [change[2] for change in changes] == ["waiting", "prefill", "running"]
    second.status = SequenceStatus.WAITING
    first.status = SequenceStatus.FINISHED
    phases.follow(iteration(3.0, 4.0, decodes=[first], finished=[first]))
    assert changes[-1] == ("r", "running", "waiting", 4.0)


# The file of a timeline


def test_lanes_are_used_again_but_never_before_they_are_free():
    lanes = Lanes()
    assert [lanes.take(0), lanes.take(0)] == [0, 1]
    lanes.give_back(0, 50)
    assert lanes.take(40) == 2
    assert lanes.take(50) == 0
    assert lanes.num_lanes == 3


def test_a_trace_file_holds_what_was_drawn(tmp_path):
    file = TraceFile(tmp_path / "trace.json")
    file.process(1, "engine")
    file.track(1, 1, "steps")
    file.span(1, 1, 'a "step"', 5, 9, {"tokens": 3})
    file.begin(1, 1, "outer", 9, {})
    file.begin(1, 1, "inner", 10, {})
    file.instant(1, 1, "now", 11, {})
    file.counter(1, "blocks", 11, {"used": 4})
    file.end(1, 1, 12, {})
    file.end(1, 1, 15, {"reason": "stop"})
    file.close()
    file.close()
    step, outer = spans(read_trace(tmp_path / "trace.json"))["steps"]
    assert (step.name, step.start, step.end, step.args) == ('a "step"', 5, 9, {"tokens": 3})
    assert (outer.start, outer.end, outer.args) == (9, 15, {"reason": "stop"})
    assert [(inner.name, inner.start, inner.end) for inner in outer.inner] == [("inner", 10, 12)]


def test_an_empty_trace_is_a_trace(tmp_path):
    TraceFile(tmp_path / "trace.json").close()
    assert json.loads((tmp_path / "trace.json").read_text()) == []


def test_a_span_that_ends_before_it_starts_is_refused(tmp_path):
    file = TraceFile(tmp_path / "trace.json")
    with pytest.raises(ValueError, match="ends at 4 us, before its start at 5 us"):
        file.span(1, 1, "step", 5, 4, {})
    file.close()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"cannot write .*/none/trace\.json: No such file"):
        TraceFile(tmp_path / "none" / "trace.json")
