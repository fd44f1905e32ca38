"""Moving blocks, plain: one after the other. The meaning of all the others."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.moves import MoveOptions

Caches = list[Array]  # each [P, Hk, S, D]


def copy(caches: Caches, sources: Array, targets: Array, *, options: MoveOptions) -> Caches:
    """Block targets[n] of each cache holds what sources[n] holds; both i32[N]."""
    return write(caches, read(caches, sources, options=options), targets, options=options)


def read(caches: Caches, blocks: Array, *, options: MoveOptions) -> Array:
    """Blocks i32[N] of L caches -> [N, L, Hk, S, D]."""
    return jnp.stack([jnp.stack([cache[block] for cache in caches]) for block in blocks])


def write(caches: Caches, staged: Array, blocks: Array, *, options: MoveOptions) -> Caches:
    """Blocks i32[N] of L caches hold staged [N, L, Hk, S, D] afterwards."""
    for n in range(len(blocks)):
        caches = [
            cache.at[blocks[n]].set(block) for cache, block in zip(caches, staged[n], strict=True)
        ]
    return caches
