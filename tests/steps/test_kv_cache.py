"""The paged cache: its layers, slots and blocks."""

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.memory.sizing import bytes_per_block
from paged_jax.steps import kv_cache

LAYERS, P, HK, S, D = 2, 6, 2, 4, 8


def numbered_cache() -> kv_cache.PagedKVCache:
    """Every element different."""
    shape = (P, HK, S, D)
    leaves = [
        jnp.asarray(np.arange(np.prod(shape)).reshape(shape) + 10_000 * i, jnp.float32)
        for i in range(2 * LAYERS)
    ]
    return kv_cache.PagedKVCache(tuple(leaves[:LAYERS]), tuple(leaves[LAYERS:]))


def test_create_gives_each_layer_its_own_arrays():
    cache = kv_cache.create(
        num_layers=LAYERS, num_blocks=P, num_kv_heads=HK, block_size=S, head_dim=D, dtype="bfloat16"
    )
    assert (cache.num_blocks, cache.block_size) == (P, S)
    leaves = jax.tree.leaves(cache)
    assert [(leaf.shape, leaf.dtype) for leaf in leaves] == [((P, HK, S, D), jnp.bfloat16)] * 4
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == 4, "donation needs that"
    assert sum(leaf.nbytes for leaf in leaves) == P * bytes_per_block(
        num_layers=LAYERS, num_kv_heads=HK, block_size=S, head_dim=D, bytes_per_value=2
    )


def test_layers_go_apart_and_together():
    cache = numbered_cache()
    again = kv_cache.PagedKVCache.of_layers(cache.layers)
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    jax.tree.map(np.testing.assert_array_equal, again, cache)


def test_slots_follow_the_table():
    tables = jnp.array([[5, 2, 3], [0, 0, 0], [1, 4, 0]], jnp.int32)
    positions = jnp.array([9, 0, 7], jnp.int32)
    slots = kv_cache.slots_of(tables, positions, block_size=4)
    assert slots.tolist() == [3 * 4 + 1, 0, 4 * 4 + 3]


def test_blocks_are_copied_in_every_layer():
    cache = numbered_cache()
    # Padded with the null block, which is copied to itself.
    sources, targets = np.array([1, 5, 0, 0], np.int32), np.array([3, 2, 0, 0], np.int32)
    copied = kv_cache.copy_blocks(cache, sources, targets)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(copied), strict=True):
        np.testing.assert_array_equal(after, before[np.array([0, 1, 5, 1, 4, 5])])


def test_what_is_swapped_out_is_swapped_in_elsewhere():
    cache, other = numbered_cache(), jax.tree.map(jnp.zeros_like, numbered_cache())
    staged = np.asarray(kv_cache.read_blocks(cache, np.array([4, 2, 0], np.int32)))
    assert staged.shape == (3, 2 * LAYERS, HK, S, D)
    swapped_in = kv_cache.write_blocks(other, staged, np.array([1, 5, 0], np.int32))
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(swapped_in), strict=True):
        np.testing.assert_array_equal(after[np.array([1, 5])], before[np.array([4, 2])])
        np.testing.assert_array_equal(after[np.array([2, 3, 4])], 0)
