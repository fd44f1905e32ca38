"""Writing keys and values in XLA: a scatter, in place where the cache is donated."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.moves import MoveOptions


def write(
    k_cache: Array,  # [P, Hk, S, D]
    v_cache: Array,  # [P, Hk, S, D]
    k: Array,  # [N, Hk, D]
    v: Array,  # [N, Hk, D]
    slots: Array,  # i32[N]
    *,
    options: MoveOptions,
) -> tuple[Array, Array]:
    """Token n stands in slot slots[n] afterwards."""
    if len(slots) == 1:
        # Written twice: a single update is rewritten by XLA into a slice update, and fused into a
        # pass over the whole cache on a CPU.
        k, v, slots = (jnp.repeat(x, 2, axis=0) for x in (k, v, slots))
    block_size = k_cache.shape[2]
    block, offset = slots // block_size, slots % block_size

    def written(cache: Array, new: Array) -> Array:
        return cache.at[block, :, offset].set(new, mode="promise_in_bounds")

    return written(k_cache, k), written(v_cache, v)
