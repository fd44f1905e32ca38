"""The calibrated cost model: what it recovers, what it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paged_jax.simulation.calibrated import CalibratedCost, Measured, StepBuckets
from paged_jax.simulation.cost_model import StepWork

BUCKETS = StepBuckets(decode=(1, 2, 4, 8), prefill=(16, 32, 64), head=(1, 4))
NOTHING = StepWork(0, 0, (), 0, block_size=16)
TRUE_SECONDS = {
    **{f"decode {rows}": 0.010 + 0.001 * rows for rows in BUCKETS.decode},
    "decode context": 2e-6,
    **{f"prefill {tokens}": 0.005 + 0.0005 * tokens for tokens in BUCKETS.prefill},
    "prefill pairs": 1e-7,
    **{f"head {rows}": 0.004 for rows in BUCKETS.head},
    "copied blocks": 1e-4,
    "swapped blocks": 3e-4,
}
TRUTH = CalibratedCost(BUCKETS, TRUE_SECONDS)


def random_work(rng: np.random.Generator) -> StepWork:
    num_decodes = int(rng.integers(0, 9))
    prefills = [(int(rng.integers(0, 100)), int(rng.integers(1, 32))) for _ in range(2)]
    prefills = prefills[: rng.integers(0 if num_decodes else 1, 3)]
    return StepWork(
        num_decodes,
        int(rng.integers(num_decodes, 400 * num_decodes + 1)),
        tuple(prefills),
        len(prefills),
        block_size=16,
        num_copied_blocks=int(rng.integers(0, 3)),
        num_swapped_blocks=int(rng.integers(0, 3)),
    )


def measurements(noise: float, count: int = 600) -> list[Measured]:
    rng = np.random.default_rng(0)
    works = [random_work(rng) for _ in range(count)]
    return [(work, TRUTH.step_s(work) * float(1 + noise * rng.uniform(-1, 1))) for work in works]


def test_what_steps_take_is_recovered_from_exact_measurements():
    cost = CalibratedCost.fit(measurements(noise=0), BUCKETS)
    rng = np.random.default_rng(1)
    for work in (random_work(rng) for _ in range(100)):
        assert cost.step_s(work) == pytest.approx(TRUTH.step_s(work), rel=1e-6)
    assert cost.swap_s(10, 16) == pytest.approx(3e-3, rel=1e-6)
    assert cost.residuals(measurements(noise=0)).p90_absolute < 1e-6


def test_noise_averages_out_and_shows_in_the_residuals():
    measured = measurements(noise=0.05)
    cost = CalibratedCost.fit(measured, BUCKETS)
    residuals = cost.residuals(measured)
    assert abs(residuals.total_relative) < 0.01
    assert residuals.median_absolute == pytest.approx(0.025, abs=0.005)  # of uniform noise
    assert residuals.num_iterations == 600
    assert cost.residuals(measurements(noise=0)).median_absolute < 0.01


def test_iterations_that_were_held_up_are_outvoted():
    measured = measurements(noise=0.01)
    held_up = [(work, 5 * seconds) for work, seconds in measured[::20]]
    cost = CalibratedCost.fit([*measured, *held_up], BUCKETS)
    assert cost.residuals(measured).median_absolute < 0.02


def test_no_term_is_negative():
    rng = np.random.default_rng(2)
    measured = [(random_work(rng), float(rng.uniform(0.001, 1.0))) for _ in range(60)]
    cost = CalibratedCost.fit(measured, BUCKETS)
    assert min(cost.seconds.values()) >= 0


def test_a_step_takes_as_long_as_the_size_that_it_is_filled_up_to():
    decodes = [replace(NOTHING, num_decodes=n, decode_context=n) for n in (5, 8)]
    assert [TRUTH.step_s(work) - n * 2e-6 for work, n in zip(decodes, (5, 8), strict=True)] == (
        pytest.approx([TRUE_SECONDS["decode 8"]] * 2)
    )
    chunks = replace(NOTHING, prefills=((0, 20), (0, 13)), num_first_samples=2)
    pairs = 20 * 21 / 2 + 13 * 14 / 2
    assert TRUTH.step_s(chunks) == pytest.approx(
        TRUE_SECONDS["prefill 64"] + TRUE_SECONDS["head 4"] + pairs * 1e-7
    )


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    cost = CalibratedCost.fit(measurements(noise=0.05), BUCKETS)
    path = tmp_path / "calibration.json"
    cost.save(path, model="tiny")
    assert CalibratedCost.load(path) == cost
    assert json.loads(path.read_text())["model"] == "tiny"


def test_what_was_never_measured_is_not_predicted():
    only_decodes = [(work, s) for work, s in measurements(noise=0) if not work.prefills]
    cost = CalibratedCost.fit(only_decodes, BUCKETS)
    with pytest.raises(ValueError, match="prefill 16, prefill pairs: no such step was measured"):
        cost.step_s(replace(NOTHING, prefills=((0, 9),)))
    with pytest.raises(ValueError, match="a decode step of 9: the executor's largest is 8"):
        cost.step_s(replace(NOTHING, num_decodes=9, decode_context=9))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the calibration"),
        ("{", "is no calibration"),
        ('{"buckets": {"decode": [1]}, "seconds": {}}', "is no calibration"),
        ("[]", "is no calibration"),
    ],
)
def test_a_file_that_holds_no_calibration_is_refused(tmp_path, content, message):
    path = tmp_path / "calibration.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        CalibratedCost.load(path)


def test_nothing_can_be_fitted_to_nothing():
    with pytest.raises(ValueError, match="no iterations were measured"):
        CalibratedCost.fit([], BUCKETS)
    with pytest.raises(ValueError, match=r"an iteration of 0.0 s was measured"):
        CalibratedCost.fit([(random_work(np.random.default_rng(0)), 0.0)], BUCKETS)
