"""The experiment on tail latency as a user runs it, on the tiny model, and its figures."""

from types import SimpleNamespace

import pytest

from experiments.costs.tail_latency import Config, Objective, case_of
from paged_jax.workloads.request import VocabRange
from tests.conftest import TINY_LM
from tests.experiments.experiment_runs import results_of, run_experiment

MIX = Config(
    num_requests=20,
    long_every=5,
    long_prompt=400,
    long_output=3,
    short_prompt=10,
    short_output=8,
    seed=3,
)


def test_one_in_so_many_prompts_is_long():
    requests = MIX.requests(VocabRange(0, 50))
    lengths = [request.num_prompt_tokens for request in requests]
    assert [i for i, length in enumerate(lengths) if length == 400] == [2, 7, 12, 17]
    assert MIX.num_long(requests) == 4
    assert all(5 <= length <= 15 for length in lengths if length != 400)
    assert len({request.prompt_token_ids for request in requests}) == 20
    assert requests == MIX.requests(VocabRange(0, 50))
    assert MIX.max_len == 403


def served(times, *, arrival=0.0, finish_reason="length"):
    """A request that got its tokens at these times; None: it was refused."""
    if times is None:
        return SimpleNamespace(output=None, refusal="2 requests wait")
    metrics = SimpleNamespace(arrival_s=arrival, token_times_s=[times])
    output = SimpleNamespace(metrics=metrics, finish_reason=finish_reason, error=None)
    return SimpleNamespace(output=output, refusal=None)


@pytest.mark.parametrize(
    ("request_served", "is_met"),
    [
        (served([2.0, 2.5, 3.0]), True),
        (served([2.1, 2.5]), False),  # the first token is late
        (served([3.0], arrival=1.0), True),
        (served([1.0, 1.6, 2.0]), False),  # a gap is too long
        (served([1.0], finish_reason="timeout"), False),
        (served(None), False),
    ],
)
def test_a_request_keeps_the_objective_from_its_first_token_to_its_last(request_served, is_met):
    assert Objective(ttft_s=2.0, gap_s=0.5).is_met(request_served) == is_met


def test_the_figures_of_a_run_count_what_was_refused_and_late():
    steps = [
        SimpleNamespace(num_decodes=2, num_prefill_seqs=1, num_prefill_tokens=9),
        SimpleNamespace(num_decodes=0, num_prefill_seqs=1, num_prefill_tokens=99),
    ]
    run = SimpleNamespace(
        served=[served([1.0, 1.2, 1.5]), served([4.0, 4.1]), served(None)], steps=steps, wall_s=5.0
    )
    found = case_of("chunked", 0.6, run, Objective(ttft_s=2.0, gap_s=0.5))
    case = SimpleNamespace(**found)
    assert (case.requests, case.refused) == (3, 1)
    assert (case.ttft_p50_s, case.gap_max_s) == (2.5, pytest.approx(0.3))
    assert case.tokens_per_s == 1.0
    assert case.goodput == 0.2
    assert case.batch_size == 2.0
    assert case.largest_prefill == 9, "that of 99 tokens held up nobody"


@pytest.mark.slow  # a whole experiment
def test_tail_latency_compares_four_systems(tmp_path):
    results, stdout = results_of(
        "costs.tail_latency",
        tmp_path,
        f"--model={TINY_LM}",
        "--num_requests=8",
        "--long_every=4",
        "--long_prompt=24",
        "--long_output=2",
        "--short_prompt=4",
        "--short_output=8",
        "--max_num_batched_tokens=8",
        "--max_num_seqs=2",
        "--rates=1e6",  # all are there at the start
    )
    cases = {case["system"]: case for case in results["cases"]}
    assert list(cases) == ["static", "continuous", "chunked", "admission"]
    assert all(case["requests"] == 8 for case in cases.values())
    assert not any(cases[name]["refused"] for name in ("static", "continuous", "chunked"))
    # A long prompt joins while another request decodes, whole or in chunks.
    assert cases["continuous"]["largest_prefill"] == 24
    assert cases["chunked"]["largest_prefill"] <= 7
    assert cases["admission"]["largest_prefill"] <= 7
    assert [row["rate"] for row in results["gap_p99_ratios"]] == [1e6]
    assert results["long_requests"] == 2
    assert results["objective"]["gap_s"] > 0
    assert "8 requests, 2 of them with 24 tokens of prompt" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates=1,0"], "--rates takes numbers above 0, got 1,0"),
        (["--long_prompt=2000"], "beyond the 1024 that tiny_lm was made for; lower --long_prompt"),
    ],
)
def test_tail_latency_refuses_bad_input_in_a_line(tmp_path, arguments, message):
    result = run_experiment("costs.tail_latency", tmp_path, f"--model={TINY_LM}", *arguments)
    assert result.returncode == 2
    assert result.stderr.strip().endswith(message)
    assert result.stderr.count("\n") == 1
