"""The experiments on what the host costs, as a user runs them; sizes are the least that show it."""

import pytest

from tests.conftest import TINY_LM
from tests.experiments.experiment_runs import results_of, run_experiment


@pytest.mark.slow  # a whole experiment
def test_pipelining_compares_a_device_that_sleeps_and_the_model(tmp_path):
    """By how much is for quiet machines; that they overlap is tested in virtual time."""
    results, stdout = results_of(
        "costs.pipelining",
        tmp_path,
        "--quick",
        "--prompt_tokens=8",
        "--output_tokens=40",
        f"--model={TINY_LM}",
    )
    simulated, real = results["cases"]
    assert simulated["device"] == "simulated"
    assert simulated["device_ms"] == pytest.approx(4)
    assert real["device"] == "cpu"
    for case in (simulated, real):
        assert case["one_by_one"] > 0
        assert case["low"] <= case["speedup"] <= case["high"]
        assert case["ahead"] > 90
    assert "not a measurement" in stdout


@pytest.mark.slow  # a whole experiment
def test_host_overhead_splits_an_iteration(tmp_path):
    results, _ = results_of(
        "costs.host_overhead",
        tmp_path,
        "--num_seqs=4",
        "--prompt_tokens=8",
        "--output_tokens=30",
        "--iterations=40",
    )
    [case] = results["cases"]
    assert 0 < case["arrays_ms"] < case["decode_ms"] <= case["decode_p99_ms"]
    assert case["iterations"] == 40


def test_sizes_that_mean_nothing_are_one_line(tmp_path):
    result = run_experiment("costs.pipelining", tmp_path, "--device_ms=-1", "--model=")
    assert result.returncode == 2
    assert result.stderr == "error: --device_ms takes integers of at least 1, got '-1'\n"
