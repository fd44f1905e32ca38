import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.lib.driver import ServedRequest, ServedRun, require_fitting, serve
from experiments.lib.serving_figures import (
    kv_usage,
    latencies,
    mean_batch_sizes,
    outcome,
    request_rows,
    run_figures,
    shortfalls,
    ttft_by_priority,
)
from experiments.serve import Occupancy, occupancy, tables, timeline
from paged_jax import CompletionOutput, RequestOutput, SamplingParams
from paged_jax.memory.usage import MemoryUsage
from paged_jax.observability.observer import IterationStats
from paged_jax.outputs import RequestMetrics
from paged_jax.workloads import WorkloadRequest
from tests.conftest import TINY_LM
from tests.observability.trace_checks import read_trace, requests_in

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(temperature=0)


def run_serve(out_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The experiment on the tiny model, in a process of its own: flags are global to one."""
    command = [sys.executable, "-m", "experiments.serve", f"--model={TINY_LM}"]
    limits = ["--max_num_seqs=2", "--max_num_batched_tokens=16", "--max_model_len=256"]
    return subprocess.run(
        [*command, *limits, f"--out_dir={out_dir}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


# The whole experiment


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Random lengths, Poisson arrivals, a pool that two sequences overrun; all that can be seen."""
    out_dir = tmp_path_factory.mktemp("serve")
    result = run_serve(
        out_dir,
        "--workload=lengths",
        "--lengths=30,25",
        "--overflow=clip",
        "--num_requests=10",
        "--max_tokens=40",
        "--max_model_len=96",
        "--arrivals=poisson",
        "--rate=100",
        "--num_blocks=6",
        "--preemption_mode=swap",
        "--swap_space_blocks=8",
        "--num_priorities=2",
        "--chrome_trace",
        "--iteration_log",
        "--metrics_port=0",
        "--show=2",
    )
    assert result.returncode == 0, result.stderr
    return out_dir, result.stdout


@pytest.mark.slow  # a whole experiment
def test_beams_are_served_without_the_prefix_cache(tmp_path):
    result = run_serve(
        tmp_path,
        "--workload=prompts",
        "--prompt=What is a class?",
        "--prompt=What is a function?",
        "--max_tokens=10",
        "--max_model_len=96",
        "--num_blocks=6",
        "--beam_width=2",
        "--n=2",
        "--early_stopping=true",
        "--enable_prefix_caching=false",
        "--profile",
    )
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert results["prefix_hit_rate"] == 0
    assert results["sharing"]["forks"] >= 2
    for row in read_lines(tmp_path / "requests.jsonl"):
        assert len(row["others"]) == 1
        assert row["num_cached_tokens"] == 0


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_hold_every_figure(served):
    out_dir, _ = served
    results = json.loads((out_dir / "results.json").read_text())
    for name in ("output_tokens", "output_tokens_per_s", "wall_s", "mean_batch_size"):
        assert results[name] > 0
    assert results["preemptions"] > 0
    assert (results["refused"], results["timed_out"], results["failed"]) == (0, 0, 0)
    assert set(results["ttft_s_by_priority"]) == {"0", "1"}
    assert 0 <= results["prefix_hit_rate"] < 1
    assert results["sharing"]["evictions"] > 0
    assert results["compilations_after_warmup"] == 0
    assert 0 < results["host_fraction"] < 1
    assert set(results["kv_usage"]) == {"token_states", "reserved", "internal", "external", "free"}
    assert sum(results["kv_usage"].values()) == pytest.approx(1)
    for name in ("ttft_s", "tpot_s", "inter_token_s", "normalised_latency_s"):
        assert 0 < results[name]["p50"] <= results[name]["p99"]
    assert results["first_completion_s"] > results["warm_up_wait_s"] > 0
    assert results["flags"]["num_blocks"] == results["engine"]["num_blocks"] == 6
    assert results["environment"]["jax"]


def test_a_line_for_each_request_and_iteration_adds_up_to_the_results(served):
    out_dir, _ = served
    results = json.loads((out_dir / "results.json").read_text())
    requests = read_lines(out_dir / "requests.jsonl")
    steps = read_lines(out_dir / "steps.jsonl")
    assert len(requests) == results["requests"] == 10
    assert sum(row["num_prompt_tokens"] for row in requests) == results["input_tokens"]
    assert sum(len(row["token_ids"]) for row in requests) == results["output_tokens"]
    for row in requests:
        assert row["arrival_s"] <= row["first_scheduled_s"] < row["first_token_s"]
        assert row["first_token_s"] <= row["last_token_s"] <= results["wall_s"]
        assert row["num_output_tokens"] == row["max_tokens"]
        assert row["finish_reason"] == "length"
    assert len(steps) == results["iterations"]
    assert sum(step["num_preempted"] for step in steps) == results["preemptions"]
    assert sum(step["num_finished"] for step in steps) == 10
    assert 0 <= steps[0]["start_s"] < steps[-1]["start_s"] < results["wall_s"]


def test_people_get_completions_tables_and_a_picture(served):
    out_dir, stdout = served
    assert "request-1: " in stdout
    assert "request-2: " not in stdout
    for figure in ("output tokens/s", "time to first token (s)", "internal fragmentation"):
        assert figure in stdout
        assert figure in (out_dir / "summary.md").read_text()
    for picture in ("timeline.png", "occupancy.png"):
        assert (out_dir / picture).read_bytes().startswith(b"\x89PNG")
        assert f"({picture})" in (out_dir / "summary.md").read_text()


def test_operators_get_a_timeline_a_log_and_metrics(served):
    out_dir, stdout = served
    results = json.loads((out_dir / "results.json").read_text())
    drawn = requests_in(read_trace(out_dir / "trace.json"))
    assert set(drawn) == {f"request-{index}" for index in range(10)}
    swapped = [phase for request in drawn.values() for phase in request.inner]
    assert sum(phase.name == "swapped" for phase in swapped) == results["preemptions_by_swap"] > 0
    log = read_lines(out_dir / "iterations.jsonl")
    assert [line["index"] for line in log] == list(range(results["iterations"]))
    assert sum(line["num_swapped_out_blocks"] for line in log) == results["swapped_out_blocks"] > 0
    assert re.search(r"^Metrics are at http://127\.0\.0\.1:\d+/metrics$", stdout, re.MULTILINE)
    metrics = results["metrics"]
    assert metrics["vllm:generation_tokens_total"] == results["output_tokens"]
    assert metrics["vllm:num_preemptions_total"] == results["preemptions"]
    assert metrics["vllm:time_to_first_token_seconds_sum"] == pytest.approx(
        10 * results["ttft_s"]["mean"]
    )


def test_help_opens_with_what_it_does(tmp_path):
    result = run_serve(tmp_path, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("Serves a workload")
    assert "--max_num_seqs: Sequences that run at a time" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=/no/such/path"], "no model at '/no/such/path'"),
        (
            ["--workload=prompts", "--prompt=Why?", "--num_blocks=1"],
            "the pool is too small for 1 of 1 requests: .* need 10 blocks of 16 slots, the pool "
            "has 1; .* max_model_len=17",
        ),
        (
            ["--workload=azure", "--trace=TRACE"],
            r"TRACE: no usable record: ContextTokens must be a whole number, got 'many' \(line 2\)",
        ),
        (["--workload=chess"], "flag --workload=chess: value should be one of"),
        (["--temperature=nan"], "temperature must be finite, got nan"),
        (["--beam_width=3", "--n=4"], "n 4 is greater than beam_width 3"),
        (
            ["--workload=prompts", "--prompt=Why?", "--beam_width=3"],
            "beam_width 3 is more than max_num_seqs 2, and beams run together",
        ),
        (["--workload=lengths", "--lengths=9,x"], "--lengths=9,x: two numbers expected"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,many,9\n")
    result = run_serve(tmp_path / "out", *(text.replace("TRACE", str(trace)) for text in arguments))
    assert result.returncode == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert re.match(f"error: {message.replace('TRACE', str(trace))}", line)


# Its parts


def test_a_request_that_the_engine_refuses_fails_alone(engine):
    requests = [
        WorkloadRequest((1, 2, 3), 5),
        WorkloadRequest((1, 100_000), 5),
        WorkloadRequest((4, 5), 6),
    ]
    run = serve(engine, requests, GREEDY)
    good, refused, other = request_rows(run)
    assert refused["refusal"] == "token id 100000 is outside the vocabulary of 259"
    assert "token_ids" not in refused
    assert (good["num_output_tokens"], other["num_output_tokens"]) == (5, 6)
    assert good["refusal"] is None


def test_what_was_not_served_is_told_with_its_reason(engine_with):
    engine = engine_with(max_num_waiting=3)
    requests = [WorkloadRequest((n + 1, 2, 3), 5) for n in range(5)]
    run = serve(engine, [*requests, WorkloadRequest((1, 100_000), 5)], GREEDY)
    late = serve(engine, requests[:2], GREEDY, priorities=[1, 0], timeout_s=1e-9)
    figures = run_figures(replace(run, served=run.served + late.served), engine, 0.0)
    assert (figures["refused"], figures["timed_out"], figures["failed"]) == (3, 2, 0)
    queue, deadline, vocabulary = figures["shortfalls"]
    assert queue["what"] == vocabulary["what"] == "refused"
    assert (queue["requests"], deadline["requests"], vocabulary["requests"]) == (2, 2, 1)
    assert "max_num_waiting" in queue["why"]
    assert (deadline["what"], deadline["why"]) == ("timed out", "its deadline passed")
    assert vocabulary["why"] == "token id 100000 is outside the vocabulary of 259"
    assert figures["ttft_s_by_priority"][1]["mean"] is None
    shown = {title: rows for title, _, rows in tables(figures)}
    assert dict(shown["Served"])["of which timed out"] == 2
    assert ("refused", queue["why"], 2) in shown["Not served to their end"]
    assert [row[0] for row in shown["Time to first token by priority (s)"]] == ["0", "1"]
    assert figures["ttft_s"]["mean"] > 0  # of those that were served


def test_tables_of_what_went_well_are_short(engine):
    run = serve(engine, [WorkloadRequest((1, 2, 3), 5)], GREEDY)
    titles = [title for title, _, _ in tables(run_figures(run, engine, 0.0))]
    assert titles == ["Served", "Latency", "KV slots"]


def test_a_failed_request_is_told_with_its_error():
    output = replace(finished(1.0, [2.0]), error="the logits are not finite")
    request = ServedRequest("r", WorkloadRequest((1,), 1), 0, output, None)
    assert outcome(request) == ("failed", "the logits are not finite")
    assert outcome(replace(request, output=finished(1.0, [2.0]))) is None


def test_who_was_cut_short_counts_in_no_latency_though_its_best_sample_is_complete():
    late = replace(finished(1.0, [2.0]), finish_reason="timeout")
    request = ServedRequest("r", WorkloadRequest((1,), 1), 0, late, None)
    assert outcome(request) == ("timed out", "its deadline passed")
    assert outcome(replace(request, output=replace(late, finish_reason="abort")))[0] == "cut short"
    whole = replace(request, output=finished(1.0, [4.0]))
    run = ServedRun([request, whole], [], 0.0, 5.0, 0.0, 0.0, 0)
    assert ttft_by_priority(run)[0]["mean"] == 3.0


def test_reasons_that_differ_in_numbers_count_as_one():
    def refused(why: str) -> ServedRequest:
        return ServedRequest("r", WorkloadRequest((1,), 1), 0, None, why)

    reasons = ["request 'a' needs 7 blocks", "request 'b' needs 12 blocks", "no room"]
    assert shortfalls(map(refused, reasons)) == [
        {"what": "refused", "why": "request 'a' needs 7 blocks", "requests": 2},
        {"what": "refused", "why": "no room", "requests": 1},
    ]


def test_requests_are_added_when_they_arrive_and_the_time_between_is_slept(engine):
    request = WorkloadRequest((1, 2, 3), 2)
    serve(engine, [request], GREEDY)  # compiles
    run = serve(engine, [request, replace(request, arrival_s=0.7)], GREEDY)
    first, second = request_rows(run)
    assert first["last_token_s"] < 0.7 <= second["first_scheduled_s"]
    assert run.served[1].output.metrics.arrival_s == run.start_s + 0.7
    assert run.idle_s == pytest.approx(0.7 - first["last_token_s"], abs=0.2)
    assert run.idle_s + run.step_s <= run.wall_s
    assert run.num_compilations == 0


def test_the_pool_must_hold_each_request_alone(engine):
    slots = engine.num_blocks * engine.block_size
    require_fitting(engine, [WorkloadRequest((1,), slots)])  # the last token takes no slot
    with pytest.raises(ValueError, match=r"too small for 1 of 2 requests: .* need 65 blocks of 16"):
        require_fitting(engine, [WorkloadRequest((1,), slots), WorkloadRequest((1, 2), slots)])


def test_the_pool_must_hold_all_beams_of_a_request(engine):
    """Prompts of two full blocks, which the beams share; 64 in all."""
    beams = SamplingParams(beam_width=4)
    request = WorkloadRequest((1,) * 32, 15 * 16)
    require_fitting(engine, [request], beams)
    message = r"too small for 1 of 1 requests: .* need 66 blocks of 16 slots, .* with max_tokens$"
    with pytest.raises(ValueError, match=message):
        require_fitting(engine, [replace(request, max_tokens=15 * 16 + 2)], beams)
    require_fitting(engine, [replace(request, max_tokens=15 * 16 + 2)])


def test_a_row_holds_every_continuation_best_first(engine):
    requests = [WorkloadRequest(tuple(b"A function is"), 6), WorkloadRequest((1, 2), 5)]
    run = serve(engine, requests, SamplingParams(n=2, best_of=3, seed=1))
    for row, served in zip(request_rows(run), run.served, strict=True):
        best, second = served.output.outputs
        assert (row["text"], row["token_ids"]) == (best.text, best.token_ids)
        assert [other["token_ids"] for other in row["others"]] == [second.token_ids]
        assert row["num_output_tokens"] == len(best.token_ids) + len(second.token_ids)
        assert row["first_token_s"] < row["last_token_s"]
    figures = latencies([served.output for served in run.served])
    assert figures["ttft_s"]["mean"] > 0


def finished(arrival_s: float, token_times_s: list[float]) -> RequestOutput:
    token_ids = [7] * len(token_times_s)
    completion = CompletionOutput(0, "", token_ids, "length", None, None)
    metrics = RequestMetrics(arrival_s, arrival_s, [token_times_s], 0)
    return RequestOutput("", None, (1,), [completion], True, metrics)


def test_latencies_count_from_the_arrival():
    figures = latencies([finished(10.0, [12.0, 12.5, 13.5]), finished(11.0, [15.0])])
    assert figures["ttft_s"]["mean"] == pytest.approx((2 + 4) / 2)
    assert figures["tpot_s"]["mean"] == pytest.approx(1.5 / 2)  # the second has no such time
    assert figures["inter_token_s"]["p50"] == pytest.approx(0.75)
    assert figures["normalised_latency_s"]["mean"] == pytest.approx((3.5 / 3 + 4) / 2)


def iteration(start_s: float, wall_s: float, batch: int, held: int, running: int):
    return IterationStats(
        index=0,
        start_s=start_s,
        wall_s=wall_s,
        device_s=wall_s,
        num_decodes=batch - 1,
        num_prefill_tokens=5,
        num_prefill_seqs=1,
        num_sampled=batch,
        num_preempted=0,
        num_finished=0,
        num_running=running,
        num_waiting=0,
        usage=MemoryUsage(held, 0, 0, 0, 100 - held),
    )


def test_a_long_iteration_weighs_more_over_time():
    steps = [iteration(0.0, 3.0, batch=2, held=10, running=2), iteration(3.0, 1.0, 6, 50, 6)]
    sizes = mean_batch_sizes(steps)
    assert sizes["mean_batch_size"] == pytest.approx(4)
    assert sizes["mean_batch_size_over_time"] == pytest.approx(3)
    usage = kv_usage(steps)
    assert usage["token_states"] == pytest.approx(0.2)
    assert usage["free"] == pytest.approx(0.8)


def test_occupancy_is_of_blocks_after_each_iteration():
    step = replace(
        iteration(5.0, 1.0, batch=2, held=10, running=1),
        num_free_blocks=60,
        num_cached_blocks=25,
        num_used_swap_blocks=4,
    )
    run = ServedRun([], [step], 5.0, 1.0, 0.0, 1.0, 0)
    [entry] = occupancy(run, 100)
    assert entry == Occupancy(1.0, used=40, cached=25, free=35, host=4)


def test_the_timeline_falls_to_zero_where_there_is_nothing_to_do():
    steps = [iteration(5.0, 1.0, batch=2, held=10, running=0), iteration(9.0, 1.0, 3, 30, 1)]
    run = ServedRun([], steps, 5.0, 5.0, 3.0, 2.0, 0)
    points = [(time, batch, shares[0]) for time, batch, _, shares in timeline(run)]
    assert points == [(0.0, 2, 10.0), (1.0, 0, 0.0), (4.0, 3, 30.0)]
