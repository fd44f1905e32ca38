"""Paged attention, plain: gather the whole table, one softmax. The meaning of all the others."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call


def refusal(call: Call) -> str | None:
    """Why it cannot do the call; None if it can."""
    tuning = call.options.tuning
    return None if tuning is None else f"it has nothing to tune, got {tuning!r}"


def attend(
    q: Array,  # [B, T, Hq, D]
    k_cache: Array,  # [P, Hk, S, D]
    v_cache: Array,  # [P, Hk, S, D]
    block_tables: Array,  # i32[B, M]
    context_lens: Array,  # i32[B], tokens of the row in the cache, its queries included
    query_starts: Array,  # i32[B], position of the row's first query
    *,
    options: AttentionOptions,
) -> AttentionResult:
    """Query t of row b, at position query_starts[b] + t, sees what stands at or before it."""
    B, T, Hq, D = q.shape
    P, Hk, S, _ = k_cache.shape
    M = block_tables.shape[1]

    positions = query_starts[:, None] + jnp.arange(T)  # [B, T]
    slots = jnp.arange(M * S)
    written = slots < context_lens[:, None]  # [B, M * S]
    visible = written[:, None] & (slots <= positions[..., None])  # [B, T, M * S]
    if options.sliding_window is not None:
        visible &= slots > positions[..., None] - options.sliding_window

    # Table entries beyond the context may hold anything: they are replaced, never followed.
    blocks = jnp.where(jnp.arange(M) * S < context_lens[:, None], block_tables, 0)
    k = jnp.moveaxis(k_cache[blocks], 2, 1).reshape(B, Hk, M * S, D).astype(jnp.float32)
    v = jnp.moveaxis(v_cache[blocks], 2, 1).reshape(B, Hk, M * S, D).astype(jnp.float32)
    # Unused slots may hold NaN, and 0 * NaN is NaN; of keys this matters to derivatives alone.
    k, v = (jnp.where(written[:, None, :, None], x, 0) for x in (k, v))

    grouped = q.reshape(B, T, Hk, Hq // Hk, D).astype(jnp.float32)
    scores = jnp.einsum("bthgd,bhsd->bthgs", grouped, k) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    scores = jnp.where(visible[:, :, None, None], scores, -jnp.inf)

    top = jnp.max(scores, axis=-1)  # [B, T, Hk, G]
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top)[..., None])
    total = jnp.sum(weights, axis=-1)
    positive = jnp.where(total > 0, total, 1)
    out = jnp.einsum("bthgs,bhsd->bthgd", weights, v) / positive[..., None]
    return AttentionResult(
        out=out.reshape(q.shape).astype(q.dtype),
        max=top.reshape(B, T, Hq),
        lse=(top + jnp.log(positive)).reshape(B, T, Hq),
    )
