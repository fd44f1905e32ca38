"""Scheduler under random load: everything ends, in order, with the output of an idle machine."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_loads import Run, check_load, random_load


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_everything_ends_in_order_with_the_same_output(rng):
    check_load(random_load(rng))


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
        assert sum(getattr(each, name) for each in schedulers) > least, name
    searches = [request for request in requests if request.beam_search is not None]
    assert sum(request.num_preemptions > 0 for request in searches) > 10
    pinned = [run for run in runs if run.load.num_pinned]
    assert len(pinned) > 30
    assert any(len(run.requests) < len(run.load.requests) for run in pinned)
    assert sum(run.scheduler.num_preemptions > 0 for run in pinned) > 5
    stats = [each.memory.stats for each in schedulers]
    for name in ("hit_tokens", "evictions", "forks", "copies"):
        assert sum(getattr(each, name) for each in stats) > 200, name


@pytest.mark.parametrize("seed", range(20))
def test_the_same_load_gives_the_same_schedule(seed):
    first, second = (Run(random_load(random.Random(seed))).to_end() for _ in range(2))
    assert first.trace == second.trace
