"""The paged KV cache: a pytree of blocks, and the pure operations on it.

    layer i:  k[i], v[i]   [num_blocks, num_kv_heads, block_size, head_dim]

                 head 0              head 1
    block 0   [S, D] null         [S, D] null        padded rows write here, nothing reads it
    block 1   [S, D] contiguous   [S, D] contiguous
    ...

Layers are separate leaves, so that donation updates each in place and no step copies the cache. A
block is contiguous in each layer: a copy or a swap moves it at once.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import block_copy

# Keys and values of one layer, each [num_blocks, num_kv_heads, block_size, head_dim].
LayerCache = tuple[Array, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of all layers; block 0 is the null block."""

    k: tuple[Array, ...]  # per layer [P, Hk, S, D]
    v: tuple[Array, ...]  # per layer [P, Hk, S, D]

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the null block included."""
        return int(self.k[0].shape[0])

    @property
    def block_size(self) -> int:
        """Slots (tokens) per block."""
        return int(self.k[0].shape[2])

    @property
    def layers(self) -> list[LayerCache]:
        return list(zip(self.k, self.v, strict=True))

    @classmethod
    def of_layers(cls, layers: list[LayerCache]) -> "PagedKVCache":
        k, v = zip(*layers, strict=True)
        return cls(k, v)


def create(
    *,
    num_layers: int,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: Any,
) -> PagedKVCache:
    """An empty cache of `num_blocks` physical blocks, the null block included."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k = tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
    v = tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
    return PagedKVCache(k, v)


def slots_of(block_tables: Array, positions: Array, block_size: int) -> Array:
    """Flat slots `i32[B]` of the tokens at `positions` `i32[B]` of tables `i32[B, M]`."""
    blocks = jnp.take_along_axis(block_tables, positions[:, None] // block_size, axis=1)[:, 0]
    return blocks * block_size + positions % block_size


def copy_blocks(
    cache: PagedKVCache, sources: Array, targets: Array, **options: Any
) -> PagedKVCache:
    """Copy blocks `sources` to `targets` (`i32[N]`, disjoint) in every layer.

    Pad both with the null block to keep N static. `options`: as in `pallas_kernels.block_copy`.
    """
    leaves, tree = jax.tree.flatten(cache)
    return jax.tree.unflatten(tree, block_copy.copy_blocks(leaves, sources, targets, **options))


def read_blocks(cache: PagedKVCache, blocks: Array, **options: Any) -> Array:
    """All layers of blocks `i32[N]`, to swap them out: `[N, 2 * layers, Hk, S, D]`."""
    return block_copy.read_blocks(jax.tree.leaves(cache), blocks, **options)


def write_blocks(cache: PagedKVCache, staged: Array, blocks: Array, **options: Any) -> PagedKVCache:
    """Swap in: write to blocks `i32[N]` what `read_blocks` has read. Pad with the null block."""
    leaves, tree = jax.tree.flatten(cache)
    return jax.tree.unflatten(tree, block_copy.write_blocks(leaves, staged, blocks, **options))
