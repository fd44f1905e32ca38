"""Moving blocks in XLA: a gather and a scatter for each cache, in place where it is donated."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.moves import MoveOptions

Caches = list[Array]  # each [P, Hk, S, D]


def copy(caches: Caches, sources: Array, targets: Array, *, options: MoveOptions) -> Caches:
    """Block targets[n] of each cache holds what sources[n] holds; both i32[N]."""
    return [_scatter(cache, targets, _gather(cache, sources)) for cache in caches]


def read(caches: Caches, blocks: Array, *, options: MoveOptions) -> Array:
    """Blocks i32[N] of L caches -> [N, L, Hk, S, D]."""
    return jnp.stack([_gather(cache, blocks) for cache in caches], axis=1)


def write(caches: Caches, staged: Array, blocks: Array, *, options: MoveOptions) -> Caches:
    """Blocks i32[N] of L caches hold staged [N, L, Hk, S, D] afterwards."""
    return [_scatter(cache, blocks, staged[:, i]) for i, cache in enumerate(caches)]


def _gather(cache: Array, blocks: Array) -> Array:
    return cache.at[blocks].get(mode="promise_in_bounds")


def _scatter(cache: Array, blocks: Array, values: Array) -> Array:
    return cache.at[blocks].set(values, mode="promise_in_bounds")
