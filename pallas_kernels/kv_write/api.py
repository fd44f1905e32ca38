"""The public entry: choose an implementation by name and call it.

To add one, write a file with a `write` of `reference`'s signature and name it in
`IMPLEMENTATIONS`. A `refusal(call)` of the file, which is optional, says why it cannot do a
`MoveCall`.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels.arguments import as_array
from pallas_kernels.moves import MoveCall, MoveOptions, as_caches, as_numbers, resolve_move
from pallas_kernels.numerics import default_numerics
from pallas_kernels.registry import Registry

IMPLEMENTATIONS = Registry(
    "kv_write",
    {
        "reference": "pallas_kernels.kv_write.reference",
        "xla": "pallas_kernels.kv_write.xla",
        "mosaic_gpu": "pallas_kernels.kv_write.mosaic_gpu",
    },
)


@default_numerics()
def write_kv(
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    slots: ArrayLike,
    *,
    impl: str = "auto",
    interpret: bool = False,
    detect_races: bool = False,
) -> tuple[Array, Array]:
    """Write keys and values `[N, Hk, D]` of N tokens into their slots of the caches.

    Caches `[P, Hk, S, D or wider]`, of any dtype; lanes beyond D get zeros. slots `i32[N]`:
    slot s is place `s % S` of block `s // S`, which must be a block of the caches. Slots are
    distinct except in the null block, where padded tokens go and which may hold anything
    afterwards. Donated caches are updated in place.

    Arrays are whatever `jnp.asarray` takes, slots of any integer type; without any, nothing is
    written. Returns the caches. ValueError for what does not fit, `Unsupported` for what `impl`
    refuses.
    """
    k_cache, v_cache = caches = as_caches([k_cache, v_cache])
    P, Hk, S, cache_D = k_cache.shape
    k, v = as_array("k", k, "[N, Hk, D]"), as_array("v", v, "[N, Hk, D]")
    slots = as_numbers("slots", slots, P * S, f"the caches have {P} blocks of {S} slots")
    if k.shape != v.shape or k.shape[:2] != (len(slots), Hk):
        raise ValueError(
            f"k and v must be [{len(slots)}, {Hk}, D] for {len(slots)} slots and {Hk} KV heads, "
            f"got {k.shape} and {v.shape}"
        )
    if k.shape[2] > cache_D:
        raise ValueError(f"k has head size {k.shape[2]}, the cache only {cache_D}")

    def widened(x: Array) -> Array:
        return jnp.pad(x.astype(k_cache.dtype), ((0, 0), (0, 0), (0, cache_D - x.shape[2])))

    options = MoveOptions(interpret, detect_races)
    name = resolve_move(IMPLEMENTATIONS, impl, MoveCall.of(caches, slots, options))
    if not len(slots):
        return k_cache, v_cache
    written: tuple[Array, Array] = IMPLEMENTATIONS.function(name, "write")(
        k_cache, v_cache, widened(k), widened(v), slots, options=options
    )
    return written
