"""Prefill steps fit the sizes that the executor computes without much padding."""

from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.executor.buckets import prefill_buckets
from paged_jax.memory.block_manager import BlockManager
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from tests.scheduling.fakes import scheduler_over

SIZES = (16, 32, 64, 96, 128)


def scheduler_of(prompt_lens: list[int], *, sizes=SIZES, budget=128, **limits) -> Scheduler:
    scheduler = scheduler_over(
        BlockManager(1000, 4, enable_prefix_caching=False),
        max_num_seqs=limits.get("max_num_seqs", 32),
        max_num_batched_tokens=budget,
        max_model_len=1024,
        max_prefill_seqs=limits.get("max_prefill_seqs", 8),
        eos_token_ids=(),
        prefill_sizes=sizes,
        enable_prefix_caching=False,
        watermark=0.01,
    )
    for i, n in enumerate(prompt_lens):
        params = SamplingParams(max_tokens=3)
        scheduler.add(Request(str(i), (5,) * n, params, arrival_time=0.0, seed=0))
    return scheduler


def prefilled_per_step(scheduler: Scheduler) -> list[int]:
    """Run to the end; the prefill tokens of each iteration that has any."""
    sizes = []
    for _ in range(10_000):
        if not scheduler.has_work:
            return sizes
        batch = scheduler.schedule()
        if batch.prefills:
            sizes.append(batch.num_prefill_tokens)
        scheduler.update(batch, [1] * batch.num_samples)
    raise AssertionError("the scheduler spins")


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [
        (16, [16]),
        (17, [16, 1]),  # 17 of 32 would be nearly half padding
        (24, [16, 8]),  # exactly a quarter is too much
        (25, [25]),
        (70, [64, 6]),
        (73, [73]),
        (128, [128]),
        (5, [5]),  # there is no smaller size
        (300, [128, 128, 32, 12]),
    ],
)
def test_a_prompt_is_cut_to_a_size_where_padding_would_be_a_quarter(prompt, steps):
    assert prefilled_per_step(scheduler_of([prompt])) == steps


def test_without_sizes_nothing_is_cut():
    assert prefilled_per_step(scheduler_of([17], sizes=())) == [17]


def test_a_chunk_that_is_cut_away_keeps_its_blocks_and_comes_next():
    scheduler = scheduler_of([64, 3, 3])
    first = scheduler.schedule()
    assert [(c.seq.request.request_id, c.num_tokens) for c in first.prefills] == [("0", 64)]
    assert scheduler.num_running == 3
    scheduler.update(first, [1])
    second = scheduler.schedule()
    assert [(c.seq.request.request_id, c.num_tokens) for c in second.prefills] == [
        ("1", 3),
        ("2", 3),
    ]


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    budget=st.integers(32, 300),
    max_prefill_seqs=st.integers(1, 8),
)
def test_no_step_from_the_smallest_size_on_is_a_quarter_padding(prompts, budget, max_prefill_seqs):
    sizes = prefill_buckets(budget)
    scheduler = scheduler_of(prompts, sizes=sizes, budget=budget, max_prefill_seqs=max_prefill_seqs)
    steps = prefilled_per_step(scheduler)
    assert sum(steps) == sum(prompts)
    for num_tokens in steps:
        size = sizes[bisect_left(sizes, num_tokens)]
        assert num_tokens < sizes[0] or size - num_tokens < size / 4
