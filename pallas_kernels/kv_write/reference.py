"""Writing keys and values, plain: the meaning of all the others. It copies the cache."""

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
    P, Hk, S, D = k_cache.shape

    def written(cache: Array, new: Array) -> Array:
        by_slot = cache.swapaxes(1, 2).reshape(P * S, Hk, D)
        return by_slot.at[slots].set(new).reshape(P, S, Hk, D).swapaxes(1, 2)

    return written(k_cache, k), written(v_cache, v)
