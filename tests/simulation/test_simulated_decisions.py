"""The simulator beside the real engine on the tiny model: whoever runs when, in every iteration."""

from typing import Any

import numpy as np
import pytest

from experiments.simulator.calibrate import CpuClock, RealEngine
from experiments.simulator.validate import curves, first_difference
from paged_jax.simulation.cost_model import StepWork
from paged_jax.simulation.run import simulate
from paged_jax.workloads import WorkloadRequest
from tests.conftest import SMALL_LIMITS


class OneSecond:
    """Each iteration takes a second: when all requests are there, times decide nothing."""

    def step_s(self, work: StepWork) -> float:
        return 1.0

    def swap_s(self, num_blocks: int, block_size: int) -> float:
        return 0.0


def requests(count: int) -> list[WorkloadRequest]:
    rng = np.random.default_rng(3)
    return [
        WorkloadRequest(tuple(rng.integers(0, 256, size=n).tolist()), int(m))
        for n, m in zip(rng.integers(1, 60, count), rng.integers(1, 50, count), strict=True)
    ]


CASES: dict[str, dict[str, Any]] = {
    "paged": {},
    "static": {"scheduling_policy": "static"},
    "shortest_prompt_first": {"scheduling_policy": "shortest_prompt_first"},
    "whole_prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "orca_max": {"memory_policy": "orca_max"},
    "orca_pow2": {"memory_policy": "orca_pow2"},
    "orca_oracle": {"memory_policy": "orca_oracle"},
    "swap": {"preemption_mode": "swap", "swap_space_blocks": 16},
}
SLOW_CASES = ("whole_prompts", "orca_pow2", "orca_oracle")  # with shapes of their own to compile


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW_CASES else []) for case in CASES],
)
def test_the_same_batches_and_the_same_slots_in_every_iteration(tiny_model, case):
    limits = SMALL_LIMITS | {"num_blocks": 12, "max_model_len": 128} | CASES[case]
    del limits["max_prefill_seqs"]
    real = RealEngine(tiny_model, CpuClock(), **limits)
    workload = requests(14)
    run, measured = real.serve(workload)
    simulated = simulate(workload, real.system, OneSecond())
    assert first_difference(curves(run), curves(simulated)) is None
    assert run.num_preemptions == simulated.num_preemptions
    assert run.num_swapped_blocks == simulated.num_swapped_blocks
    assert max(stats.num_waiting for stats in run.iterations) > 0
    # Where memory grows with the tokens it is too short for those that were admitted.
    reserves = case.startswith("orca") or case == "static"
    assert (run.num_preemptions > 0) == (not reserves)
    assert (run.num_swapped_blocks > 0) == (case == "swap")
    # What a calibration measures is what the simulator asks the time of.
    asked: list[StepWork] = []

    class Asked(OneSecond):
        def step_s(self, work: StepWork) -> float:
            asked.append(work)
            return 1.0

    simulate(workload, real.system, Asked())
    assert asked == [work for work, _ in measured]


def test_a_difference_is_found_and_named():
    one, other = [(0,) * 10, (1,) * 10], [(0,) * 10, (1, 1, 2, *[1] * 7)]
    assert first_difference(one, one) is None
    assert first_difference(one, other) == "iteration 1: preempted 1, simulated 2"
    assert first_difference(one, one[:1]) == "2 iterations, simulated 1"
