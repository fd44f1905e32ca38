"""Scheduler under random load: everything ends, in order, with the output of an idle machine."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling.fakes import FakeExecutor, make_request, make_scheduler, outputs
from tests.scheduling.loads import Run, check_load, random_load


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_everything_ends_in_order_with_the_same_output(rng):
    check_load(random_load(rng))


@pytest.mark.slow  # a soak
def test_a_soak_of_random_loads_sees_preemptions_and_keeps_every_promise():
    rng = random.Random(0)
    runs = [check_load(random_load(rng)) for _ in range(250)]
    requests = [request for run in runs for request in run.requests]
    reasons = [seq.finish_reason for request in requests for seq in request.sequences]
    for reason in ("abort", "timeout", "error", "stop"):
        assert reasons.count(reason) > 20, reason
    schedulers = [run.scheduler for run in runs]
    for name, least in (
        ("num_preemptions", 100),
        ("num_preemptions_by_swap", 20),
        ("num_swapped_in_blocks", 20),
        ("num_swap_fallbacks", 5),
    ):
        assert sum(getattr(each.counters, name) for each in schedulers) > least, name
    searches = [request for request in requests if request.beam_search is not None]
    assert sum(request.num_preemptions > 0 for request in searches) > 10
    pinned = [run for run in runs if run.load.num_pinned]
    assert len(pinned) > 30
    assert any(len(run.requests) < len(run.load.requests) for run in pinned)
    assert sum(run.scheduler.counters.num_preemptions > 0 for run in pinned) > 5
    stats = [each.memory.stats for each in schedulers]
    for name in ("hit_tokens", "evictions", "forks", "copies"):
        assert sum(getattr(each, name) for each in stats) > 200, name


@pytest.mark.parametrize("seed", range(20))
def test_the_same_load_gives_the_same_schedule(seed):
    first, second = (Run(random_load(random.Random(seed))).to_end() for _ in range(2))
    assert first.trace == second.trace


def test_a_long_overload_with_swaps_ends_with_every_output_complete():
    """Many requests at once on a pool for a sixth of those that run, all three modes in turn."""
    rng = random.Random(1)
    for mode in ("recompute", "swap", "auto"):
        scheduler = make_scheduler(
            num_blocks=97,
            block_size=8,
            max_num_seqs=32,
            max_num_batched_tokens=256,
            max_model_len=200,
            policy="priority",
            preemption_mode=mode,
            num_swap_blocks=60,
            enable_prefix_caching=True,
        )
        executor = FakeExecutor(scheduler.memory)
        requests = [
            make_request(
                str(i),
                rng.randint(1, 30),
                seed=i,
                arrival=float(i),
                priority=rng.randint(0, 3),
                max_tokens=rng.randint(1, 100),
                ignore_eos=True,
                n=rng.choice([1, 1, 1, 2]),
            )
            for i in range(200)
        ]
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            batch = scheduler.schedule()
            sampled = executor.run(batch)
            seconds = SimpleNamespace(device_s=0.01 * batch.num_tokens, swap_s=0.0)
            scheduler.estimates.observe(batch, seconds)
            scheduler.update(batch, sampled)
        scheduler.memory.check_invariants()
        assert scheduler.counters.num_preemptions > 50
        assert (scheduler.counters.num_preemptions_by_swap > 20) == (mode != "recompute")
        for request in requests:
            assert {len(tokens) for tokens, _ in outputs(request)} == {request.params.max_tokens}
