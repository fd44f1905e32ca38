"""The experiments on what the host costs, as a user runs them; sizes are the least that show it."""

import pytest
from conftest import TINY_LM
from test_sharing_experiments import results_of, run_experiment


def test_pipelining_hides_the_host_behind_a_device_that_sleeps(tmp_path):
    results, stdout = results_of(
        "pipelining",
        tmp_path,
        "--quick",
        "--prompt_tokens=8",
        "--output_tokens=40",
        f"--model={TINY_LM}",
    )
    simulated, real = results["cases"]
    assert simulated["device"] == "simulated"
    assert simulated["device_ms"] == pytest.approx(4)
    assert simulated["speedup"] > 1.02
    assert simulated["ahead"] > 90
    assert real["device"] == "cpu"
    assert real["pipelined"] > 0
    assert real["ahead"] > 90
    assert "not a measurement" in stdout


def test_host_overhead_splits_an_iteration(tmp_path):
    results, _ = results_of(
        "host_overhead",
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
    result = run_experiment("pipelining", tmp_path, "--device_ms=-1", "--model=")
    assert result.returncode == 2
    assert result.stderr == "error: --device_ms takes integers of at least 1, got -1\n"
