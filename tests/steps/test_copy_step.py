"""Copies of an iteration on the device: those blocks, in every layer, and no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Engine
from paged_jax.executor.compilation import count_compilations
from paged_jax.scheduling.batch import ScheduledBatch


@pytest.fixture(scope="module")
def executor(tiny_model):
    """It runs up to 12 sequences, so that an iteration has up to 12 copies."""
    engine = Engine(
        tiny_model,
        block_size=2,
        num_blocks=40,
        max_num_seqs=12,
        max_num_batched_tokens=16,
        max_model_len=32,
        warm_up=False,
    )
    return engine.executor


@pytest.mark.parametrize("num_copies", [1, 2, 3, 8, 9, 12])
def test_copies_reach_every_layer_and_leave_the_rest(executor, num_copies):
    rng = np.random.default_rng(num_copies)
    filled = [rng.standard_normal(leaf.shape) for leaf in jax.tree.leaves(executor.cache)]
    tree = jax.tree.structure(executor.cache)
    executor.cache = jax.tree.unflatten(tree, [jnp.asarray(x, jnp.float32) for x in filled])
    before = jax.tree.map(np.array, executor.cache)
    blocks = rng.permutation(np.arange(1, 41))
    targets = blocks[:num_copies].tolist()
    sources = rng.choice(blocks[num_copies:], num_copies).tolist()  # some more than once
    copies = list(zip(sources, targets, strict=True))

    result = executor.execute(ScheduledBatch([], [], [], copies))

    assert (result.tokens, result.logprobs) == ([], [])
    for leaf, old in zip(jax.tree.leaves(executor.cache), jax.tree.leaves(before), strict=True):
        wanted = old.copy()
        wanted[targets] = old[sources]
        np.testing.assert_array_equal(leaf[1:], wanted[1:])


def test_a_few_sizes_do_for_any_number_of_copies(executor):
    with count_compilations() as count:
        for num_copies in range(1, 13):
            copies = [(i, 40 - i) for i in range(1, num_copies + 1)]
            executor.execute(ScheduledBatch([], [], [], copies))
    assert count.programs <= 3
