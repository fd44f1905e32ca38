"""Simulated runs: times, cuts and averages on a virtual clock."""

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from paged_jax.engine.core import EngineCore
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.request import Request
from paged_jax.simulation.cost_model import CostModel, RooflineCost, StepWork
from paged_jax.simulation.executor import BeamCandidates, SimulatedExecutor, VirtualClock
from paged_jax.simulation.run import SystemConfig, simulate
from paged_jax.simulation.setups import find_gpu, find_model_shape
from paged_jax.workloads import VocabRange, WorkloadRequest, arrive_poisson, build_workload

SYSTEM = SystemConfig(num_slots=160, max_model_len=128, watermark=0.0)
OPT_13B = RooflineCost(find_gpu("A100-40GB"), find_model_shape("OPT-13B"))


@dataclass(frozen=True)
class Fixed(CostModel):
    """So many seconds for each iteration, prefill token and swapped block."""

    iteration_s: float = 1.0
    prefill_token_s: float = 0.0
    swapped_block_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        seconds = self.iteration_s + work.num_prefill_tokens * self.prefill_token_s
        return seconds + self.swap_s(work.num_swapped_blocks, work.block_size)

    def swap_s(self, num_blocks: int, block_size: int) -> float:
        return num_blocks * self.swapped_block_s


def request(num_prompt: int, num_output: int, arrival_s: float = 0.0) -> WorkloadRequest:
    return WorkloadRequest(tuple(range(1, 1 + num_prompt)), num_output, arrival_s=arrival_s)


def sharegpt_like(count: int, rate: float) -> list[WorkloadRequest]:
    requests, _ = build_workload(
        "lengths",
        lengths="sharegpt",
        num_requests=count,
        max_model_len=2048,
        vocab=VocabRange(0, 1000),
        arrivals="poisson",
        rate=rate,
    )
    return requests


def test_the_clock_never_runs_backwards():
    clock = VirtualClock()
    clock.advance(2.0)
    for seconds in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match="time cannot pass by"):
            clock.advance(seconds)
    with pytest.raises(ValueError, match=r"cannot go from 2.0 s to 1.9 s"):
        clock.advance_to(1.9)
    assert clock() == 2.0


def test_a_cost_model_that_predicts_less_than_no_time_ends_the_run():
    with pytest.raises(ValueError, match="time cannot pass by -1"):
        simulate([request(3, 2)], SYSTEM, Fixed(-1.0))


def test_tokens_come_when_the_cost_model_says():
    [only] = simulate([request(10, 5, arrival_s=3.0)], SYSTEM, Fixed()).requests
    assert (only.first_token_s, only.last_token_s) == (4.0, 8.0)
    assert (only.ttft_s, only.latency_s, only.normalised_latency_s) == (1.0, 5.0, 1.0)
    assert (only.num_prompt_tokens, only.num_output_tokens) == (10, 5)


def test_who_arrives_during_an_iteration_joins_the_next_and_idle_time_is_skipped():
    run = simulate([request(4, 3), request(4, 2, 0.5), request(4, 1, 100.0)], SYSTEM, Fixed())
    assert [r.first_token_s for r in run.requests] == [1.0, 2.0, 101.0]
    assert [r.last_token_s for r in run.requests] == [3.0, 3.0, 101.0]
    assert (run.duration_s, run.busy_s) == (101.0, 4.0)
    assert run.requests_per_s == pytest.approx(3 / 101)
    assert run.output_tokens_per_s == pytest.approx(6 / 101)


def test_averages_are_over_time_not_over_iterations():
    # Two prefills take 41 s each; in the second one the first sequence decodes.
    run = simulate([request(40, 4), request(40, 1, 42.5)], SYSTEM, Fixed(1.0, 1.0))
    assert [stats.wall_s for stats in run.iterations] == [41.0, 1.0, 1.0, 41.0]
    assert run.mean_batch_size == pytest.approx((41 + 1 + 1 + 2 * 41) / 84)
    token_states = [0, 40, 41, 42]
    expected = sum(n * s.wall_s for n, s in zip(token_states, run.iterations, strict=True))
    assert run.memory_shares["token_states"] == pytest.approx(expected / 84 / 160)
    assert sum(run.memory_shares.values()) == pytest.approx(1.0)


def test_requests_cut_at_the_end_are_not_finished():
    requests = [request(4, 2), request(4, 4), request(4, 2, 2.2), request(4, 1, 3.5)]
    run = simulate(requests, SYSTEM, Fixed(), horizon_s=3.5)
    assert [r.finished for r in run.requests] == [True, False, False]  # the last never arrived
    assert run.requests[1].first_token_s == 1.0
    assert run.requests[2].first_token_s is None  # would have come at 4 s
    assert (len(run.finished), run.num_unfinished) == (1, 2)
    assert run.requests_per_s == pytest.approx(1 / 3.5)
    assert run.normalised_latency_s == 1.0
    assert sum(stats.wall_s for stats in run.iterations) == run.duration_s == 3.5


def test_a_horizon_beyond_the_work_counts_the_idle_time():
    run = simulate([request(4, 2)], SYSTEM, Fixed(), horizon_s=10.0)
    assert (run.duration_s, run.busy_s, run.requests_per_s) == (10.0, 2.0, 0.1)
    late = simulate([request(4, 2), request(4, 1, 50.0)], SYSTEM, Fixed(), horizon_s=10.0)
    assert (late.duration_s, late.busy_s, len(late.requests)) == (10.0, 2.0, 1)


def test_what_is_refused_is_recorded_and_the_others_go_on():
    run = simulate([request(200, 5), request(4, 2)], SYSTEM, Fixed())
    assert "max_model_len 128" in run.requests[0].refusal
    assert [r.finished for r in run.requests] == [False, True]
    assert (run.num_refused, run.num_unfinished) == (1, 0)


def test_what_the_queue_has_no_room_for_is_refused():
    system = replace(SYSTEM, max_num_waiting=2)
    run = simulate([request(4, 2) for _ in range(3)], system, Fixed())
    assert [r.finished for r in run.requests] == [True, True, False]
    assert run.num_refused == 1


def test_goodput_counts_who_met_the_objective():
    # The second waits for the first, which fills the memory.
    run = simulate([request(100, 28), request(100, 28)], SYSTEM, Fixed())
    slow = run.requests[1].normalised_latency_s
    assert slow > run.requests[0].normalised_latency_s == 1.0
    assert run.goodput(1.0) == pytest.approx(1 / run.duration_s)
    assert run.goodput(slow) == pytest.approx(2 / run.duration_s)


def test_a_full_memory_makes_requests_wait_and_preempts_as_in_the_engine():
    run = simulate([request(60, 60) for _ in range(4)], SYSTEM, Fixed())
    assert run.num_preemptions > 0
    assert sum(r.num_preemptions for r in run.requests) == run.num_preemptions
    assert run.requests[1].num_preemptions > 0
    assert run.requests[1].first_token_s == 1.0  # not when it was computed again
    assert all(r.finished and r.num_output_tokens == 60 for r in run.requests)
    assert max(stats.num_decodes for stats in run.iterations) == 2


def test_swapping_takes_the_time_that_its_blocks_take():
    requests = [request(60, 60) for _ in range(4)]
    swapping = replace(SYSTEM, preemption_mode="swap", swap_space_blocks=64)
    run = simulate(requests, swapping, Fixed(swapped_block_s=0.5))
    assert run.num_preemptions_by_swap > 0
    # Out, and in: each time some of the 8 blocks that a sequence can have.
    assert 2 <= run.num_swapped_blocks / run.num_preemptions_by_swap <= 16
    waited = run.duration_s - len(run.iterations)
    assert waited == pytest.approx(0.5 * run.num_swapped_blocks)
    recomputing = simulate(requests, SYSTEM, Fixed())
    assert recomputing.num_recomputed_tokens > run.num_recomputed_tokens
    assert recomputing.num_swapped_blocks == 0


def test_a_static_batch_ends_before_the_next_one_begins():
    static = replace(SYSTEM, scheduling_policy="static")
    run = simulate([request(30, 10), request(30, 40), request(30, 10, 2.0)], static, Fixed())
    assert run.requests[2].first_token_s > run.requests[1].last_token_s
    together = simulate([request(30, 10), request(30, 40), request(30, 10, 2.0)], SYSTEM, Fixed())
    assert together.requests[2].first_token_s < together.requests[0].last_token_s


def test_a_prompt_is_prefilled_whole_where_chunks_are_off():
    limits = {"max_num_batched_tokens": 128, "num_slots": 400, "max_num_seqs": 8}
    requests = [request(100, 4), request(100, 4)]
    for chunked, expected in ((True, [128, 72]), (False, [100, 100])):
        system = replace(SYSTEM, enable_chunked_prefill=chunked, **limits)
        run = simulate(requests, system, Fixed())
        assert [s.num_prefill_tokens for s in run.iterations if s.num_prefill_tokens] == expected


def test_samples_and_beams_share_blocks():
    requests = [request(30, 20) for _ in range(3)]
    alone = simulate(requests, SYSTEM, Fixed())
    assert max(stats.usage.shared for stats in alone.iterations) == 0
    for params in (SamplingParams(n=2), SamplingParams(beam_width=2, temperature=0)):
        run = simulate(requests, SYSTEM, Fixed(), params=params)
        assert max(stats.usage.shared for stats in run.iterations) >= 16
        assert [r.num_output_tokens for r in run.requests] == [20] * 3
        assert run.output_tokens_per_s == pytest.approx(3 * 20 * params.n / run.duration_s)
        assert run.sharing.forks > 0


def test_generated_filler_is_found_by_nobody_else():
    system = SystemConfig(num_slots=480, max_model_len=128, enable_prefix_caching=True)
    follow_up = WorkloadRequest(tuple(range(1, 41)) + (7,) * 40, 8, arrival_s=100.0)
    run = simulate([request(40, 40), follow_up], system, Fixed())
    assert [r.num_cached_tokens for r in run.requests] == [0, 32]  # the prompt's full blocks

    scheduler, clock = system.scheduler(), VirtualClock()
    beams = BeamCandidates(np.random.default_rng(0))
    core = EngineCore(scheduler, SimulatedExecutor(scheduler.memory, Fixed(), clock, beams))
    twins = [
        Request(name, (1, 2, 3), SamplingParams(n=2, max_tokens=4), 0.0, seed=0) for name in "ab"
    ]
    for twin in twins:
        core.add(twin)
    while scheduler.has_work:
        core.step()
    outputs = [tuple(seq.output_token_ids) for twin in twins for seq in twin.sequences]
    assert len(set(outputs)) == 4
    assert all(token < 0 for output in outputs for token in output)


def test_a_run_depends_on_nothing_but_its_arguments():
    requests = sharegpt_like(60, rate=4.0)
    tight = SystemConfig(num_slots=4000)
    first = simulate(requests, tight, OPT_13B)
    simulate(requests, SystemConfig(num_slots=15_700), OPT_13B)  # one more system to compare
    again = simulate(arrive_poisson(requests, rate=4.0, seed=0), tight, OPT_13B)
    assert first.requests == again.requests
    assert first.iterations == again.iterations
    assert first.num_preemptions > 0


def test_waiting_costs_latency_once_memory_is_full():
    requests = sharegpt_like(100, rate=2.0)
    large, small = (
        simulate(requests, SystemConfig(num_slots=slots), OPT_13B) for slots in (15_700, 3000)
    )
    assert small.normalised_latency_s > 1.5 * large.normalised_latency_s
    assert small.mean_batch_size < large.mean_batch_size


def test_a_simulated_hour_takes_less_than_30_s_of_one_core():
    """A twelfth of it here: 600 requests at 2 a second."""
    requests = sharegpt_like(600, rate=2.0)
    start = time.process_time()
    run = simulate(requests, SystemConfig(num_slots=15_700), OPT_13B, horizon_s=300.0)
    assert time.process_time() - start < 30 / 12
    assert len(run.finished) > 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"requests": [request(4, 2, 1.0), request(4, 2)]}, "not ordered by arrival_s"),
        ({"horizon_s": 0.0}, "horizon_s must be above 0, got 0.0"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    given = {"requests": [request(4, 2)], "system": SYSTEM, "cost": Fixed()} | arguments
    with pytest.raises(ValueError, match=message):
        simulate(**given)


def test_averages_of_a_run_that_took_no_time_are_refused():
    run = simulate([request(200, 5)], SYSTEM, Fixed())
    with pytest.raises(ValueError, match="no iteration took any time"):
        _ = run.mean_batch_size
