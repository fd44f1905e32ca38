"""Tokens that go from one step to the next on the device, whatever becomes of the rows."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import SamplingParams
from paged_jax.executor.buckets import bucket_of, decode_buckets
from paged_jax.executor.compilation import count_compilations
from paged_jax.executor.decode_rows import TokenFeed
from paged_jax.scheduling.request import Request
from paged_jax.steps.sampling import Sampled

MAX_SEQS = 12
BUCKETS = decode_buckets(MAX_SEQS)  # 1, 2, 4, 8, 12
SEQS = Request("r", (1,), SamplingParams(n=MAX_SEQS), 0.0, 0).sequences


def sampled(seqs, tokens) -> Sampled:
    """What a step returns for these sequences; padded rows hold anything."""
    padded = np.full(bucket_of(BUCKETS, len(seqs)), 99, np.int32)
    padded[: len(seqs)] = tokens
    nothing = jnp.zeros(0)
    return Sampled(jax.device_put(padded), *[nothing] * 5)


@pytest.fixture(scope="module")
def feed():
    return TokenFeed(MAX_SEQS, lambda step, size: None)


@pytest.mark.parametrize("seed", range(20))
def test_each_row_gets_what_was_sampled_for_its_sequence(feed, seed):
    rng = random.Random(seed)
    seqs = rng.sample(SEQS, rng.randint(1, MAX_SEQS))
    num_firsts = rng.randint(0, len(seqs))
    tokens = {seq.seq_id: rng.randrange(50) for seq in seqs}
    steps = [
        (part, sampled(part, [tokens[seq.seq_id] for seq in part]))
        for part in (seqs[num_firsts:], seqs[:num_firsts])
        if part
    ]
    next_seqs = rng.sample(seqs, rng.randint(1, len(seqs)))
    num_rows = bucket_of(BUCKETS, len(next_seqs))
    fed = feed.tokens(next_seqs, steps, num_rows)
    assert (fed.shape, fed.dtype) == ((num_rows,), np.int32)
    assert fed[: len(next_seqs)].tolist() == [tokens[seq.seq_id] for seq in next_seqs]


def test_rows_that_stay_get_the_very_array_that_was_sampled(feed):
    step = sampled(SEQS[:3], [5, 6, 7])
    assert feed.tokens(list(SEQS[:3]), [(SEQS[:3], step)], 4) is step.tokens


def test_the_number_of_programs_is_that_of_the_buckets(feed):
    """Not that of pairs of buckets."""
    with count_compilations() as count:
        for before in range(1, MAX_SEQS + 1):
            step = sampled(SEQS[:before], range(before))
            for after in range(1, before + 1):
                feed.tokens(SEQS[before - after : before], [(SEQS[:before], step)], after)
    assert count.programs <= len(BUCKETS) + MAX_SEQS  # sizes in, and those out, which have none


def test_what_it_runs_is_asked_for_first():
    asked = []
    feed = TokenFeed(MAX_SEQS, lambda step, size: asked.append((step, size)))
    feed.tokens(SEQS[1:3], [(SEQS[:3], sampled(SEQS[:3], [1, 2, 3]))], 2)
    assert asked == [("hold", 4), ("take", 2)]
