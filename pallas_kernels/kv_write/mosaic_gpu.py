"""Writing keys and values in Mosaic GPU: a program for each token, with all of its heads.

The caches are passed as references, so that the kernel writes into them and no more. What belongs
to the null block is not written at all: nothing reads it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.derivatives import without_derivatives
from pallas_kernels.mosaic import MOSAIC_GPU, interpreter, load, refusal, row_layout, store
from pallas_kernels.moves import NULL_BLOCK, MoveOptions

__all__ = ["refusal", "write"]


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
    k_cache, v_cache, k, v = without_derivatives(MOSAIC_GPU, k_cache, v_cache, k, v)
    N, Hk, D = k.shape
    block_size = k_cache.shape[2]
    layout = row_layout(Hk, D, k.dtype)

    def write_token(
        k_ref: Any, v_ref: Any, slots_ref: Any, k_cache_ref: Any, v_cache_ref: Any
    ) -> None:
        token = lax.axis_index("token")
        slot = slots_ref[token]
        block = lax.div(slot, jnp.int32(block_size))
        offset = lax.rem(slot, jnp.int32(block_size))

        @pl.when(block != NULL_BLOCK)
        def _() -> None:
            new = [load(ref.at[token], layout) for ref in (k_ref, v_ref)]  # both are under way
            for cache_ref, rows in zip((k_cache_ref, v_cache_ref), new, strict=True):
                store(cache_ref.at[block, :, offset], rows)

    k_cache_ref, v_cache_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    plgpu.kernel(
        write_token,
        grid=(N,),
        grid_names=("token",),
        interpret=interpreter(options.interpret, options.detect_races),
    )(k, v, slots, k_cache_ref, v_cache_ref)
    return k_cache_ref[...], v_cache_ref[...]
