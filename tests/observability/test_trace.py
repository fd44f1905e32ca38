"""The timeline, the iteration log and the profile of an engine that is overrun."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.observability.chrome_trace import ChromeTrace
from paged_jax.observability.observer import IterationLog, watch
from paged_jax.observability.profiler import iteration_mark, profile
from tests.conftest import SMALL_LIMITS
from tests.observability.trace_checks import read_trace, requests_in, spans

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=40)
# Four sequences run, of which two fit; more are given up and swapped out.
TIGHT = SMALL_LIMITS | {"num_blocks": 6, "max_model_len": 96, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def engine_of(tiny_model):
    """Engines with room for a part of what they are asked, by how they preempt."""
    engines: dict[tuple[str, bool], Engine] = {}

    def build(preemption_mode: str, *, pipelined: bool = False) -> Engine:
        key = preemption_mode, pipelined
        if key not in engines:
            engines[key] = Engine(
                tiny_model,
                **TIGHT,
                preemption_mode=preemption_mode,
                swap_space_blocks=8,
                pipelined=pipelined,
            )
        return engines[key]

    return build


def run(engine: Engine, num_requests: int = 6, **options) -> None:
    for n in range(num_requests):
        engine.add_request(f"r{n}", [n + 1] * (10 + n), LONG, **options)
    while engine.has_work:
        engine.step()


def traced(engine: Engine, path, **options) -> list[dict]:
    with watch(engine.core, ChromeTrace(path, engine.core)):
        run(engine, **options)
    return read_trace(path)


def instants(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["ph"] == "i" and event["name"] == name]


@pytest.mark.parametrize(("mode", "pipelined"), [("recompute", False), ("swap", True)])
def test_the_timeline_shows_each_phase_of_each_request_without_a_gap(
    engine_of, tmp_path, mode, pipelined
):
    engine = engine_of(mode, pipelined=pipelined)
    scheduler = engine.core.scheduler
    total, by_swap = (
        -scheduler.counters.num_preemptions,
        -scheduler.counters.num_preemptions_by_swap,
    )
    events = traced(engine, tmp_path / "trace.json")
    total += scheduler.counters.num_preemptions
    by_swap += scheduler.counters.num_preemptions_by_swap
    assert total > 0
    assert (by_swap > 0) == (mode == "swap")
    requests = requests_in(events)
    assert set(requests) == {f"r{n}" for n in range(6)}
    away: Counter[str] = Counter()
    for request in requests.values():
        first, *later = [phase.name for phase in request.inner]
        assert (first, later[:2], later[-1]) == ("waiting", ["prefill", "running"], "running")
        assert request.args["finish_reason"] == "length"
        assert request.args["output_tokens"] == 40
        assert later.count("waiting") + later.count("swapped") == request.args["preemptions"]
        away.update(later)
    assert (away["waiting"], away["swapped"]) == (total - by_swap, by_swap)
    modes = Counter(event["args"]["mode"] for event in instants(events, "preemption"))
    assert (modes["recompute"], modes["swap"]) == (total - by_swap, by_swap)


def test_the_timeline_shows_what_each_iteration_did(engine_of, tmp_path):
    engine = engine_of("swap")
    steps = []
    engine.core.on_iteration = steps.append
    events = traced(engine, tmp_path / "trace.json")
    engine.core.on_iteration = None
    tracks = spans(events)
    assert len(tracks["iterations"]) == len(steps)
    for drawn, stats in zip(tracks["iterations"], steps, strict=True):
        assert drawn.args["tokens"] == stats.num_decodes + stats.num_prefill_tokens
        assert drawn.end - drawn.start <= 1e6 * stats.wall_s + 2
    decodes = [stats.num_decodes for stats in steps if stats.num_decodes]
    assert [drawn.args["sequences"] for drawn in tracks["decode"]] == decodes
    prefills = [stats.num_prefill_tokens for stats in steps if stats.num_prefill_seqs]
    assert [drawn.args["tokens"] for drawn in tracks["prefill"]] == prefills
    swaps = [(s.num_swapped_out_blocks, s.num_swapped_in_blocks) for s in steps]
    drawn_swaps = [(s.args["blocks_out"], s.args["blocks_in"]) for s in tracks["swaps"]]
    assert drawn_swaps == [moved for moved in swaps if any(moved)] != []
    counters = [event for event in events if event["ph"] == "C"]
    blocks = [event["args"] for event in counters if event["name"] == "KV blocks"]
    assert len(blocks) == len(steps)
    assert all(sum(each.values()) == engine.num_blocks for each in blocks)
    assert max(each["used"] for each in blocks) > 0
    host = [event["args"]["used"] for event in counters if event["name"] == "host blocks"]
    assert max(host) > 0 == host[-1]


def test_a_request_may_be_drawn_in_any_phase_when_it_ends(engine_of, tmp_path):
    engine = engine_of("recompute")
    path = tmp_path / "trace.json"
    with watch(engine.core, ChromeTrace(path, engine.core)):  # until some are still in work
        ids = [engine.add_request(None, [n + 1] * 40, GREEDY) for n in range(4)]
        engine.add_request("late", [9] * 40, GREEDY, timeout_s=1e-9)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            engine.add_request("bad", [100_000], GREEDY)
        engine.abort(ids[3])
        engine.step()
        engine.abort(ids[0])
    for request_id in ids:
        engine.abort(request_id)
    events = read_trace(path)
    requests = requests_in(events)
    phases = {name: [phase.name for phase in drawn.inner] for name, drawn in requests.items()}
    assert phases[ids[3]] == phases["late"] == ["waiting"]
    assert phases[ids[0]] == ["waiting", "prefill"]
    assert requests["late"].args["finish_reason"] == "timeout"
    assert requests[ids[0]].args["finish_reason"] == "abort"
    assert requests[ids[1]].args["finish_reason"] is None
    [refused] = instants(events, "refused")
    assert "outside the vocabulary" in refused["args"]["reason"]


def test_a_request_that_arrived_before_others_ended_is_drawn_beside_them(engine_of, tmp_path):
    """It was added later, as requests are that arrive while an iteration runs."""
    engine = engine_of("recompute")
    path = tmp_path / "trace.json"
    with watch(engine.core, ChromeTrace(path, engine.core)):
        engine.generate([5] * 16, GREEDY, progress=False)
        early = engine.core.clock() - 1e-3
        engine.add_request("early", [6] * 16, GREEDY, arrival_time=early)
        while engine.has_work:
            engine.step()
        engine.generate([7] * 16, GREEDY, progress=False)
    tracks = spans(read_trace(path))
    assert [span.name for span in tracks["requests, lane 1"]] == ["early"]
    assert len(tracks["requests, lane 0"]) == 2


def test_samples_and_beams_are_drawn_as_one_request(engine_of, tmp_path):
    engine = engine_of("swap")
    path = tmp_path / "trace.json"
    with watch(engine.core, ChromeTrace(path, engine.core)):
        samples = SamplingParams(n=3, max_tokens=12, ignore_eos=True, seed=1)
        beams = SamplingParams(beam_width=2, max_tokens=12, ignore_eos=True)
        engine.generate([[5] * 30, [6] * 30, [7] * 30], [samples, beams, samples], progress=False)
    requests = requests_in(read_trace(path))
    assert [request.args["sequences"] for request in requests.values()] == [3, 2, 3]


def test_a_step_that_fails_leaves_no_gap_in_the_timeline(engine_of, tmp_path, monkeypatch):
    engine = engine_of("recompute")
    execute, calls = engine.executor.execute, []

    def lose_the_cache_once(batch):
        calls.append(batch)
        if len(calls) == 5:
            for array in (*engine.executor.cache.k, *engine.executor.cache.v):
                array.delete()
            raise RuntimeError("the device is gone")
        return execute(batch)

    monkeypatch.setattr(engine.executor, "execute", lose_the_cache_once)
    with pytest.warns(RuntimeWarning, match="planned again"):
        events = traced(engine, tmp_path / "trace.json", num_requests=1)
    [failed] = instants(events, "a step has failed")
    for request in requests_in(events).values():
        phases = [phase.name for phase in request.inner]
        assert phases == ["waiting", "prefill", "running", "waiting", "prefill", "running"]
        assert request.inner[3].start == pytest.approx(failed["ts"], abs=1000)


def test_a_line_for_each_iteration_is_in_the_log_while_the_engine_runs(engine_of, tmp_path):
    engine = engine_of("swap")
    path = tmp_path / "iterations.jsonl"
    with watch(engine.core, IterationLog(path)):
        engine.add_request("r", [5] * 16, GREEDY)
        engine.step()
        [first] = [json.loads(line) for line in path.read_text().splitlines()]
        while engine.has_work:
            engine.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == first
    assert first["num_prefill_tokens"] == 16
    assert first["usage"]["token_states"] + first["usage"]["reserved"] > 0
    assert len(lines) == 12
    assert [line["ended"] for line in lines] == [{}] * 11 + [{"r": "length"}]
    indices = [line["index"] for line in lines]
    assert indices == list(range(indices[0], indices[0] + 12))
    assert all(line["wall_s"] >= line["device_s"] >= line["swap_s"] >= 0 for line in lines)


def test_a_profile_of_jax_is_taken(engine_of, tmp_path):
    engine = engine_of("recompute")
    with profile(tmp_path / "profile"):
        engine.add_request("r", [5] * 16, GREEDY)
        for index in range(3):
            with iteration_mark(index):
                engine.step()
    engine.abort("r")
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert list((tmp_path / "profile").rglob("perfetto_trace.json.gz"))
