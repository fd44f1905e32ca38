"""Swaps of an iteration: the bytes that left come back, in every layer, and nothing else moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Engine
from paged_jax.executor import swap_pool
from paged_jax.executor.compilation import count_compilations
from paged_jax.executor.swap_pool import SwapPool, read_step, write_step
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.steps import kv_cache
from tests.steps.test_in_place import passes_over_cache

NUM_BLOCKS, NUM_SWAP_BLOCKS = 100, 130


@pytest.fixture(scope="module")
def executor(tiny_model):
    engine = Engine(
        tiny_model,
        block_size=2,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        preemption_mode="swap",
        swap_space_blocks=NUM_SWAP_BLOCKS,
        warm_up=False,
    )
    return engine.executor


def swap(executor, *, outs=(), ins=(), copies=()):
    return executor.execute(
        ScheduledBatch([], [], [], list(copies), swap_outs=list(outs), swap_ins=list(ins))
    )


def fill(executor, rng: np.random.Generator) -> list[np.ndarray]:
    """Random bits in every leaf, NaN of all kinds among them; returns copies, as integers."""
    leaves, tree = jax.tree.flatten(executor.cache)
    bits = [rng.integers(0, 2**32, leaf.shape, dtype=np.uint32) for leaf in leaves]
    executor.cache = jax.tree.unflatten(tree, [jnp.asarray(x.view(np.float32)) for x in bits])
    return bits


def bits_of(executor) -> list[np.ndarray]:
    return [np.asarray(leaf).view(np.uint32) for leaf in jax.tree.leaves(executor.cache)]


@pytest.mark.parametrize("num_swaps", [1, 3, 4, 9, 64, 65, 100])
def test_blocks_come_back_bit_for_bit_wherever_they_go(executor, num_swaps):
    rng = np.random.default_rng(num_swaps)
    before = fill(executor, rng)
    sources = (rng.permutation(NUM_BLOCKS) + 1)[:num_swaps].tolist()
    hosts = rng.permutation(NUM_SWAP_BLOCKS)[:num_swaps].tolist()
    swap(executor, outs=zip(sources, hosts, strict=True))
    for leaf, old in zip(bits_of(executor), before, strict=True):
        np.testing.assert_array_equal(leaf[1:], old[1:])

    now = fill(executor, rng)
    targets = (rng.permutation(NUM_BLOCKS) + 1)[:num_swaps].tolist()
    result = swap(executor, ins=zip(hosts, targets, strict=True))

    assert (result.tokens, result.logprobs) == ([], [])
    for leaf, old, filled in zip(bits_of(executor), before, now, strict=True):
        wanted = filled.copy()
        wanted[targets] = old[sources]
        np.testing.assert_array_equal(leaf[1:], wanted[1:])


def test_out_then_in_then_copies(executor):
    """A block is read before another takes its place, and copied when that is there."""
    rng = np.random.default_rng(0)
    before = fill(executor, rng)
    swap(executor, outs=[(7, 3)])
    swap(executor, outs=[(5, 8)], ins=[(3, 5)], copies=[(5, 6)])
    swap(executor, ins=[(8, 9)])
    for leaf, old in zip(bits_of(executor), before, strict=True):
        wanted = old.copy()
        wanted[[5, 6, 9]] = old[[7, 7, 5]]
        np.testing.assert_array_equal(leaf[1:], wanted[1:])


def test_what_the_host_holds_in_other_blocks_stays(executor):
    rng = np.random.default_rng(1)
    pool = executor._swap_pool.blocks.view(np.uint32)
    pool[:] = rng.integers(0, 2**32, pool.shape, dtype=np.uint32)
    kept = pool.copy()
    before = fill(executor, rng)
    swap(executor, outs=[(1, 0), (2, 129), (3, 64)])
    np.testing.assert_array_equal(pool[1:64], kept[1:64])
    np.testing.assert_array_equal(pool[65:129], kept[65:129])
    np.testing.assert_array_equal(pool[[0, 129, 64]], np.stack([x[1:4] for x in before], axis=1))


def test_the_time_of_swaps_is_part_of_the_device_s(executor):
    result = swap(executor, outs=[(1, 1)])
    assert 0 < result.swap_s <= result.device_s
    assert swap(executor, copies=[(1, 2)]).swap_s == 0


def test_a_few_sizes_do_for_any_number_of_swaps(executor):
    with count_compilations() as count:
        for num_swaps in range(1, 101):
            pairs = [(i, i) for i in range(1, num_swaps + 1)]
            swap(executor, outs=pairs, ins=pairs)
    assert count.programs <= 8


@pytest.mark.parametrize("name", ["read 1", "read 64", "write 4", "write 64"])
def test_a_swap_makes_no_pass_over_the_cache(executor, name):
    compiled = executor.lowerings()[name]().compile()
    assert not passes_over_cache(compiled.as_text(), executor.cache.k[0].shape)


@pytest.mark.parametrize("pinned", [False, True])
def test_bits_of_bfloat16_go_through_pageable_and_page_locked_memory(pinned):
    shape, rng = (9, 2, 4, 8), np.random.default_rng(3)
    bits = [rng.integers(0, 2**16, shape, dtype=np.uint16) for _ in range(4)]
    leaves = [jnp.asarray(x.view(jnp.bfloat16)) for x in bits]
    cache = kv_cache.PagedKVCache(tuple(leaves[:2]), tuple(leaves[2:]))
    pool = SwapPool(cache, 8, pinned=pinned)
    for blocks, hosts in pool.parts([(3, 1), (5, 0), (7, 7)]):
        pool.put(hosts, read_step(cache, blocks))
    for blocks, hosts in pool.parts([(1, 7), (2, 0), (4, 1)]):
        cache = write_step(cache, pool.get(hosts, len(blocks)), blocks)
    for leaf, old in zip(jax.tree.leaves(cache), bits, strict=True):
        wanted = old.copy()
        wanted[[1, 2, 4]] = old[[7, 5, 3]]
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint16)[1:], wanted[1:])


def cache_of(block_bytes: int) -> kv_cache.PagedKVCache:
    """Its blocks are of that many bytes in all; nothing is allocated."""
    leaf = jax.ShapeDtypeStruct((9, 1, 1, block_bytes // 4), jnp.bfloat16)
    return kv_cache.PagedKVCache((leaf,), (leaf,))


def test_steps_move_what_they_are_given_and_little_more():
    pool = SwapPool(cache_of(block_bytes=64), 500)
    assert pool.buckets == [1, 4, 16, 64]
    for num_moves in range(300):
        moves = [(i, 2 * i) for i in range(1, num_moves + 1)]
        moved, size = [], 0
        for blocks, hosts in pool.parts(moves):
            assert len(blocks) in pool.buckets
            assert not blocks[len(hosts) :].any(), "the null block"
            moved += zip(blocks.tolist(), hosts, strict=False)
            size += len(blocks)
        assert moved == moves
        assert size <= 2 * num_moves


def test_a_step_stages_a_bounded_number_of_bytes():
    limit = swap_pool.STAGING_BYTES
    assert SwapPool(cache_of(limit // 10), 20).buckets == [1, 4, 10]
    assert SwapPool(cache_of(2 * limit), 3).buckets == [1]
    assert SwapPool(cache_of(64), 9).buckets == [1, 4, 9]


def test_without_a_host_pool_there_are_no_steps(engine):
    assert not [
        name for name in engine.executor.lowerings() if name.split()[0] in ("read", "write")
    ]
