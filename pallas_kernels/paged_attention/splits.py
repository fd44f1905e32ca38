"""Attention to a context from attention to shares of it, as flash-decoding computes it."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.spec import AttentionResult

# Stands for minus infinity where two are subtracted; below any score.
LOWEST = -1e38


def combine_splits(out: Array, top: Array, total: Array, dtype: DTypeLike) -> AttentionResult:
    """The result of N splits, all float32, each about its share of the keys.

    out `[N, B, T, Hq, D]`: sum of exp(score - top) * value; top `[N, B, T, Hq]`: largest score,
    `LOWEST` or less where the query sees nothing of the share; total `[N, B, T, Hq]`: sum of
    exp(score - top), 0 there. The result's `out` has the given dtype.
    """
    largest = jnp.maximum(jnp.max(top, axis=0), LOWEST)
    share = jnp.exp(top - largest)  # [N, B, T, Hq]
    total = jnp.sum(share * total, axis=0)
    out = jnp.sum(share[..., None] * out, axis=0)
    empty = total == 0
    return AttentionResult(
        out=(out / jnp.where(empty, 1, total)[..., None]).astype(dtype),
        max=jnp.where(empty, -jnp.inf, largest),
        lse=jnp.where(empty, -jnp.inf, largest + jnp.log(total)),
    )


def combine_finished(out: Array, top: Array, lse: Array, dtype: DTypeLike) -> AttentionResult:
    """The result of N splits, each finished: its output is a mean of the values of its share.

    out `[..., N, D]` of any float dtype; top and lse `f32[..., N]`, `LOWEST` or a share of it
    where the query sees nothing of the share, and out is 0. Only what the caller uses is computed;
    the output by one kernel, as this is how XLA recognizes it.
    """
    if lse.shape[-1] == 1:
        out, top, lse = out[..., 0, :], top[..., 0], lse[..., 0]
    else:
        weights = jax.nn.softmax(lse, axis=-1)
        out = jnp.einsum("...n,...nd->...d", weights, out, precision="highest")
        top, lse = jnp.max(top, axis=-1), jax.nn.logsumexp(lse, axis=-1)
    empty = top < LOWEST / 2
    return AttentionResult(
        out.astype(dtype), jnp.where(empty, -jnp.inf, top), jnp.where(empty, -jnp.inf, lse)
    )
