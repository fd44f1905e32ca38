"""Paged attention in Pallas Mosaic GPU: tensor cores by mma.sync, copies by TMA or cp.async.

One kernel for decoding and for prefill, and for four generations of GPUs. `mosaic_body` has the
computation, `mosaic_tiles` its geometry, `mosaic_pipeline` the copies, `tuning` the choices.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import targets
from pallas_kernels.paged_attention.mosaic_body import View
from pallas_kernels.paged_attention.mosaic_kernel import Kernel
from pallas_kernels.paged_attention.mosaic_sources import Blocks
from pallas_kernels.paged_attention.mosaic_tiles import Tiles
from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call
from pallas_kernels.paged_attention.tuning import Tuning, default_tuning
from pallas_kernels.targets import TARGETS, Target

HEAD_SIZES = (64, 128, 256)


def cache_head_size(head_size: int) -> int:
    """The next of the head sizes that tiles of 128 bytes and products of 64 rows cover."""
    return next((size for size in HEAD_SIZES if head_size <= size), head_size)


def refusal(call: Call) -> str | None:
    """Why the kernel cannot do the call; None if it can."""
    S, D = call.block_size, call.head_size
    if call.target is None and not call.options.interpret:
        return "it needs an NVIDIA GPU; interpret=True runs it in the interpreter"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"its tensor core products take bfloat16 and float16, not {call.dtype.name}"
    if D not in HEAD_SIZES:
        return f"the cache's head size must be one of {HEAD_SIZES} (cache_head_size), got {D}"
    if S % 8:
        return f"blocks must be a multiple of 8 tokens, a tile in shared memory; got {S}"
    if not _uses_tma(call.target) and S * D % 2048:
        return f"without TMA a block of a head must be a multiple of 2048 elements, got {S} * {D}"
    if call.num_blocks * call.num_kv_heads * S >= 2**31:
        return f"{call.num_blocks} blocks of {call.num_kv_heads} * {S} rows are 2**31 rows or more"
    return _misfit(_tuning(call), call)


def _uses_tma(target: Target | None) -> bool:
    return (target or TARGETS["H200"]).compute_capability >= (9, 0)


def _tuning(call: Call) -> Tuning:
    tuning = call.options.tuning
    if tuning is None:
        return default_tuning(call)
    if not isinstance(tuning, Tuning):
        raise ValueError(f"tuning must be a Tuning, got {tuning}")
    return tuning


def _misfit(tuning: Tuning, call: Call) -> str | None:
    """Why the tuning does not fit the call; None if it does."""
    S, tokens = call.block_size, tuning.block_kv
    if call.num_kv_heads % tuning.kv_heads:
        return f"{call.num_kv_heads} KV heads are no multiple of {tuning.kv_heads} of a program"
    if tokens % S and S % tokens:
        return f"neither is a tile of {tokens} tokens a multiple of a block of {S} nor the reverse"
    if not _uses_tma(call.target) and min(S, tokens) * call.head_size % 2048:
        return f"without TMA a copy must be a multiple of 2048 elements, got {min(S, tokens)} rows"
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
    """Query t of row b, at position query_starts[b] + t, sees what stands at or before it."""
    B, T, Hq, D = q.shape
    P, Hk, S, _ = k_cache.shape
    target = targets.current()
    call = Call(B, T, Hq, Hk, D, S, P, block_tables.shape[1], q.dtype, options, target)
    tuning = _tuning(call)
    tiles = Tiles(
        heads=tuning.kv_heads,
        group=Hq // Hk,
        num_queries=T,
        columns=tuning.query_columns,
        tokens=tuning.block_kv,
        chunk=min(S, tuning.block_kv),
        head_size=D,
        joined=tuning.kv_heads == 1 or tuning.block_kv >= S,
    )
    kernel = Kernel(tiles, options, tuning.num_stages, tuning.num_splits, _uses_tma(target))

    def blocks(tables: Any, row: Array, first_head: Array, view: View) -> Blocks:
        first_column = lax.div(view.first, jnp.int32(S))
        last_column = lax.div(jnp.maximum(view.end - 1, 0), jnp.int32(S))
        return Blocks(tiles, P, Hk, S, tables, row, first_head, first_column, last_column)

    rows = (P * Hk * S, D)
    return kernel(
        q,
        k_cache.reshape(rows),
        v_cache.reshape(rows),
        block_tables,
        context_lens,
        query_starts,
        blocks,
    )
