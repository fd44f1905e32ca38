"""The experiments on the simulator as a user runs them, on the tiny model."""

import csv

import pytest

from paged_jax.simulation.calibrated import CalibratedCost
from tests.conftest import TINY_LM
from tests.experiments.experiment_runs import results_of

SMALL_ENGINE = [
    f"--model={TINY_LM}",
    "--quick",
    "--clock=cpu",  # other tests run beside this one
    "--max_num_seqs=4",
    "--max_num_batched_tokens=32",
    "--max_model_len=128",
    "--num_blocks=12",
]


@pytest.mark.slow  # a whole experiment
def test_a_calibration_measures_steps_of_every_size_and_is_read_by_the_simulator(tmp_path):
    results, stdout = results_of("simulator.calibrate", tmp_path, *SMALL_ENGINE)
    measured = {case["term"]: case for case in results["cases"]}
    sizes = ("decode 1", "decode 2", "decode 4", "prefill 16", "prefill 32", "head 1", "head 4")
    assert measured.keys() >= {*sizes, "decode context", "prefill pairs"}
    assert all(case["iterations"] >= 2 for case in measured.values())
    assert len(results["held_out_median_percent"]) == 2
    assert results["measured"]["iterations"] == results["residuals"]["num_iterations"]
    cost = CalibratedCost.load(tmp_path / "calibration.json")
    milliseconds = {term: seconds * 1e3 for term, seconds in cost.seconds.items()}
    assert milliseconds == {term: case["ms"] for term, case in measured.items()}
    assert "Rounds predicted by the others" in stdout


def test_the_simulator_decides_as_the_engine_does_in_every_iteration(tmp_path):
    results, stdout = results_of(
        "simulator.validate",
        tmp_path,
        *SMALL_ENGINE,
        "--num_requests=12",
        "--clock=cpu",
        figure="validate_simulator",
    )
    assert results["curves_equal"] == [True]
    assert results["num_preemptions"] > 0
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * results["num_iterations"]
    assert "batches and memory are the same in each" in stdout
    cases = {(case["workload"], case["figure"]): case for case in results["cases"]}
    at_once = cases["at_once", "output tokens/s"]
    # A step's time is not off by a factor. CPU time does not grow with what else the machine does.
    assert 0.5 < at_once["simulated"] / at_once["real"] < 2
    assert {workload for workload, _ in cases} == {"at_once", "poisson"}
    with_goal = [case for case in results["cases"] if case["in_goal"] is not None]
    assert len(with_goal) == 10
    for case in with_goal:
        assert case["in_goal"] == (abs(case["difference_percent"]) <= results["goal_percent"])
