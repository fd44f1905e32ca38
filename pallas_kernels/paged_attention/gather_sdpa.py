"""Paged attention by gathering the blocks for `jax.nn.dot_product_attention`, cuDNN's on a GPU.

It is meant for prefill, where many queries share the cost of the gathered copy. The copy is as long
as a row's table, however short the context, and so is the mask. In cuDNN the mask is a bias of q's
dtype: it lowers the score of a key that a query does not see, in float16 by no more than 32768.
"""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call
from pallas_kernels.registry import Unsupported
from pallas_kernels.targets import current


def refusal(call: Call) -> str | None:
    """Why it cannot do the call; None if it can."""
    if call.options.soft_cap is not None:
        return "jax.nn.dot_product_attention has no soft cap"
    if call.options.tuning is not None:
        return f"it has nothing to tune, got {call.options.tuning!r}"
    if call.target is None:
        is_lacking = call.dtype == jnp.float16 or jnp.finfo(call.dtype).bits < 16
        return f"JAX has no attention in {call.dtype.name} on a CPU" if is_lacking else None
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's attention takes bfloat16 and float16, not {call.dtype.name}"
    largest = 256 if call.target.compute_capability >= (9, 0) else 128
    if call.head_size % 8 or call.head_size > largest:
        return (
            f"cuDNN's attention on {call.target.name} takes head sizes up to {largest} in steps "
            f"of 8, not {call.head_size}"
        )
    return None


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
    """Query t of row b, at position query_starts[b] + t, sees what stands at or before it.

    The softmax statistics come from products of their own: JAX returns them rounded to q's dtype.
    Where they are not used, the compiler leaves these products out.
    """
    B, T, Hq, D = q.shape
    _, Hk, S, _ = k_cache.shape
    M = block_tables.shape[1]
    slots = jnp.arange(M * S)
    positions = query_starts[:, None] + jnp.arange(T)  # [B, T]
    is_written = slots < context_lens[:, None]  # [B, M * S]
    is_visible = is_written[:, None] & (slots <= positions[..., None])  # [B, T, M * S]
    if options.sliding_window is not None:
        is_visible &= slots > positions[..., None] - options.sliding_window
    # Table entries beyond the context may hold anything: they are replaced, never followed.
    blocks = jnp.where(jnp.arange(M) * S < context_lens[:, None], block_tables, 0)

    def gather(cache: Array) -> Array:  # [B, M * S, Hk, D]
        x = cache.at[blocks].get(mode="promise_in_bounds")  # [B, M, Hk, S, D]
        x = jnp.moveaxis(x, 2, 3).reshape(B, M * S, Hk, D)
        return jnp.where(is_written[..., None, None], x, 0)  # unused slots may hold NaN

    k = gather(k_cache)
    try:
        out = jax.nn.dot_product_attention(
            q,
            k,
            gather(v_cache),
            mask=is_visible[:, None],
            scale=options.scale,
            implementation="xla" if current() is None else "cudnn",
        )
    except RuntimeError as error:  # no cuDNN, or one that cannot do this on the device
        raise Unsupported(f"attention 'gather_sdpa' cannot do this: {error}") from error
    scores = options.scale * jnp.einsum(
        "bthgd,bshd->bthgs", q.reshape(B, T, Hk, Hq // Hk, D), k, preferred_element_type=jnp.float32
    )
    scores = jnp.where(is_visible[:, :, None, None], scores, -jnp.inf).reshape(B, T, Hq, M * S)
    sees_any = jnp.any(is_visible, axis=-1)[..., None, None]
    return AttentionResult(
        out=jnp.where(sees_any, out, 0),
        max=jnp.max(scores, axis=-1),
        lse=jax.nn.logsumexp(scores, axis=-1),
    )
