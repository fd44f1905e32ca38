"""The gate before a change is rolled out, as it is run and in its parts."""

import ast
import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.compare import (
    FIGURES,
    Difference,
    Figure,
    compare_figure,
    differences,
    first_difference,
    judge,
    paired_ratio,
)
from experiments.lib.driver import ServedRequest, ServedRun
from paged_jax import CompletionOutput, RequestOutput
from paged_jax.outputs import RequestMetrics
from paged_jax.workloads import WorkloadRequest
from tests.conftest import TINY_LM

ROOT = Path(__file__).resolve().parents[2]
COMMON = "--max_num_batched_tokens=16 --max_model_len=256 --num_blocks=32"
# Rounds are short here and machines may be busy: nothing that noise could do is beyond these.
WIDE_LIMITS = ("--min_throughput_ratio=0.01", "--max_latency_ratio=100")


def compare(out_dir: Path, *arguments: str):
    """(exit code, results.json or None, stdout, stderr)."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "experiments.compare", f"--out_dir={out_dir}"),
            *("--workload=lengths", "--lengths=20,12", "--overflow=clip", "--num_requests=6"),
            *("--max_tokens=12", "--rounds=2", "--confidence=0.5", *arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    path = out_dir / "results.json"
    results = json.loads(path.read_text()) if path.exists() else None
    return result.returncode, results, result.stdout, result.stderr


# The whole experiment


def test_a_configuration_passes_against_itself(tmp_path):
    code, results, stdout, stderr = compare(
        tmp_path, f"--common=--model={TINY_LM} {COMMON} --max_num_seqs=2", *WIDE_LIMITS
    )
    assert code == 0, stderr
    assert (results["equal"], results["first_difference"], results["exit_code"]) == (1.0, None, 0)
    assert results["engines"]["baseline"] == results["engines"]["candidate"]
    assert not results["baseline_differs_from_itself"]
    assert "PASSES" in stdout
    assert (tmp_path / "differences.jsonl").read_text() == ""
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["figure"] for row in rows] == [figure.name for figure in FIGURES]
    for row in rows:
        assert float(row["low"]) <= float(row["ratio"]) <= float(row["high"])
        assert row["verdict"] == "ok"
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # a whole experiment
def test_a_candidate_that_changes_outputs_fails_and_is_shown_where(tmp_path):
    other = tmp_path / "other_lm"
    shutil.copytree(TINY_LM, other)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "down_proj" in name)
    noise = np.random.default_rng(0).normal(size=weights[name].shape)
    weights[name] = (weights[name] + noise).astype(weights[name].dtype)
    save_file(weights, other / "model.safetensors")
    code, results, stdout, stderr = compare(
        tmp_path / "out",
        f"--common={COMMON} --max_num_seqs=2",
        f"--baseline=--model={TINY_LM}",
        f"--candidate=--model={other}",
        *WIDE_LIMITS,
    )
    assert code == 1, stderr
    assert results["equal"] < 1
    lines = (tmp_path / "out" / "differences.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == round(6 * (1 - results["equal"]))
    assert results["first_difference"]["token"] == min(each["token"] for each in found)
    assert all(each["baseline"] != each["candidate"] for each in found)
    assert "requests have equal outputs" in results["reasons"][0]
    assert "FAILS" in stdout


@pytest.mark.slow  # a whole experiment
def test_a_candidate_that_is_slower_fails(tmp_path):
    """It computes one token at a time, the baseline up to sixteen; which figure shows it best
    depends on what else the machine does.
    """
    code, results, _, stderr = compare(
        tmp_path,
        f"--common=--model={TINY_LM} {COMMON}",
        "--baseline=--max_num_seqs=6",
        "--candidate=--max_num_seqs=1 --max_num_batched_tokens=1",
    )
    assert code == 1, stderr
    assert results["equal"] == 1
    worse = [case["figure"] for case in results["cases"] if case["verdict"] == "worse"]
    assert results["reasons"] == [f"{figure} is worse" for figure in worse] != []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--candidate=--blocksize=8"], "--candidate='--blocksize=8': Unknown command line flag"),
        (["--baseline=fast"], "--baseline='fast': unexpected 'fast'; flags start with --"),
        (["--candidate=--watermark=3"], "the candidate: watermark must be at least 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, message):
    common = f"--model={TINY_LM} {COMMON} --max_num_seqs=2"
    code, _, _, stderr = compare(tmp_path, f"--common={common}", *arguments)
    assert code == 2
    [line] = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {message}")


def test_help_opens_with_the_question_and_has_an_example():
    documentation = ast.get_docstring(ast.parse((ROOT / "experiments/compare.py").read_text()))
    assert documentation.startswith("Whether ")
    assert "\n    python -m experiments.compare --" in documentation
    assert "--quick" in documentation


# Ratios


def test_a_ratio_is_the_geometric_mean_of_the_rounds():
    ratio = paired_ratio([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], 0.95)
    assert (ratio.low, ratio.mean, ratio.high) == pytest.approx((2, 2, 2))
    assert paired_ratio([1.0, 1.0], [0.5, 2.0], 0.95).mean == pytest.approx(1)


def test_a_round_that_slows_both_sides_widens_nothing():
    ratio = paired_ratio([1.0, 5.0, 0.2], [1.1, 5.5, 0.22], 0.95)
    assert ratio.high / ratio.low == pytest.approx(1)


def test_an_interval_holds_the_ratio_as_often_as_it_says():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        noise = np.exp(rng.normal(0, 0.3, 5))
        ratio = paired_ratio([1.0] * 5, list(0.9 * noise), 0.9)
        held += ratio.low <= 0.9 <= ratio.high
    assert 0.88 < held / 2000 < 0.92


@pytest.mark.parametrize(
    ("low", "high", "more_is_better", "verdict"),
    [
        (0.96, 1.2, True, "ok"),
        (0.8, 0.94, True, "worse"),
        (0.8, 1.2, True, "unclear"),
        (0.9, 0.95, False, "ok"),
        (0.96, 2.0, False, "worse"),
        (0.9, 1.0, False, "unclear"),
    ],
)
def test_a_verdict_needs_the_whole_interval(low, high, more_is_better, verdict):
    ratio = paired_ratio([1.0, 1.0], [low, high], 0.5)
    assert (ratio.low, ratio.high) == pytest.approx((low, high))  # what one sigma of two rounds is
    assert judge(ratio, 0.95, more_is_better=more_is_better) == verdict


def test_throughput_and_latency_of_runs_are_compared():
    def run(seconds: float) -> ServedRun:
        each = served([1, 2, 3])
        metrics = RequestMetrics(0.0, 0.0, [[seconds, 2 * seconds, 3 * seconds]], 0)
        output = replace(each.output, metrics=metrics)
        return ServedRun([replace(each, output=output)], [], 0.0, 3 * seconds, 0.0, 0.0, 0)

    def verdicts(candidate_s: float) -> set[str]:
        baseline, candidate = [run(1.0), run(1.01)], [run(candidate_s), run(candidate_s)]
        return {
            compare_figure(
                figure,
                baseline,
                candidate,
                limit=0.9 if figure.more_is_better else 1.1,
                confidence=0.9,
            ).verdict
            for figure in FIGURES
        }

    assert verdicts(1.0) == {"ok"}
    assert verdicts(1.5) == {"worse"}
    assert verdicts(1.1) == {"unclear"}


def test_a_figure_that_neither_side_has_is_no_reason_to_fail():
    runs = [ServedRun([], [], 0.0, 1.0, 0.0, 0.0, 0)] * 3
    latency = Figure("x", lambda run: None, more_is_better=False)
    compared = compare_figure(latency, runs, runs, limit=1.0, confidence=0.95)
    assert (compared.verdict, compared.ratio) == ("none", None)
    values = iter([1.0, None, None, None, None, None])
    partly = Figure("x", lambda run: next(values), more_is_better=False)
    assert compare_figure(partly, runs, runs, limit=1.0, confidence=0.95).verdict == "unclear"


# Differences


def served(*token_ids: list[int], reason: str = "length", refusal: str | None = None):
    outputs = [CompletionOutput(i, "", ids, reason, None, None) for i, ids in enumerate(token_ids)]
    metrics = RequestMetrics(0.0, 0.0, [[1.0]], 0)
    output = RequestOutput("r", None, (1,), outputs, True, metrics)
    request = WorkloadRequest((1,), 3)
    return ServedRequest("r", request, 0, None if refusal else output, refusal)


def test_sequences_part_at_a_token_or_where_one_ends():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_the_first_difference_of_each_request_is_found():
    before = [served([1, 2], [3, 4]), served([5]), served([6]), served([7, 8]), served([9])]
    after = [
        served([1, 2], [3, 0]),
        served([5]),
        served(refusal="no room"),
        served([7]),
        served([9], reason="stop"),
    ]
    assert list(differences(before, after)) == [
        Difference("r", 1, 1, "4", "0"),
        Difference("r", None, None, "served", "refused: no room"),
        Difference("r", 0, 1, "8", "(ended)"),
        Difference("r", 0, None, "length", "stop"),
    ]
    assert not list(differences(before, before))


def test_two_refusals_are_equal():
    refused = [served(refusal="no room")]
    assert not list(differences(refused, refused))
