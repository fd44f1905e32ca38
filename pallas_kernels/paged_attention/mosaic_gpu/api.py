"""Paged attention in Pallas Mosaic GPU: tensor cores by mma.sync, copies by TMA or cp.async.

One kernel for decoding and for prefill, and for four generations of GPUs: `kernel` has its programs
and their softmax, `products` the matrix products, `copies` the way of tiles to shared memory,
`tiles` the geometry, `tuning` the choices.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import targets
from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call

from .copies import Blocks
from .kernel import CP_ASYNC_ELEMENTS, Kernel, View, uses_tma
from .products import MmaProducts, Products
from .tiles import Tiles
from .tuning import Tuning, default_tuning

__all__ = ["attend", "cache_head_size", "default_tuning", "refusal"]

HEAD_SIZES = (64, 128, 256)


def cache_head_size(head_size: int) -> int:
    """The next head size whose rows are whole lines of 128 bytes and whole products of 64 rows."""
    return next((size for size in HEAD_SIZES if head_size <= size), head_size)


def refusal(call: Call) -> str | None:
    """Why the kernel cannot do the call; None if it can. ValueError for a foreign tuning."""
    return refused(call) or kernel_of(call, MmaProducts).misfit(call)


def attend(
    q: Array,  # [B, T, Hq, D]
    k_cache: Array,  # [P, Hk, S, D]
    v_cache: Array,  # [P, Hk, S, D]
    block_tables: Array,  # i32[B, M]
    context_lens: Array,  # i32[B], tokens of the row in the cache, its queries included
    query_starts: Array,  # i32[B], position of the row's first query
    *,
    options: AttentionOptions,
    products: type[Products] = MmaProducts,
) -> AttentionResult:
    """Query t of row b, at position query_starts[b] + t, sees what stands at or before it."""
    B, T, Hq, D = q.shape
    P, Hk, S, _ = k_cache.shape
    M = block_tables.shape[1]
    call = Call(B, T, Hq, Hk, D, S, P, M, q.dtype, options, targets.current())
    kernel = kernel_of(call, products)

    def blocks(row: Array, first_head: Array, view: View, tables: Any) -> Blocks:
        first_column = lax.div(view.first, jnp.int32(S))
        last_column = lax.div(jnp.maximum(view.end - 1, 0), jnp.int32(S))
        return Blocks(kernel.tiles, P, Hk, S, tables, row, first_head, first_column, last_column)

    k, v = (cache.reshape(P * Hk * S, D) for cache in (k_cache, v_cache))
    return kernel(q, k, v, context_lens, query_starts, blocks, block_tables)


def refused(call: Call) -> str | None:
    """What neither tuning nor instructions can help: None, or why the call cannot be done."""
    S, D = call.block_size, call.head_size
    if call.target is None and not call.options.interpret:
        return "it needs an NVIDIA GPU; interpret=True runs it in the interpreter"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"its products take bfloat16 and float16, not {call.dtype.name}"
    if D not in HEAD_SIZES:
        return f"the cache's head size must be one of {HEAD_SIZES} (cache_head_size), got {D}"
    if S % 8:
        return f"a block must be a multiple of 8 tokens, a tile of shared memory; got {S}"
    if not uses_tma(call.target) and S * D % CP_ASYNC_ELEMENTS:
        return (
            f"without TMA a head's part of a block must be a multiple of {CP_ASYNC_ELEMENTS} "
            f"elements, got {S} * {D}"
        )
    if call.num_blocks * call.num_kv_heads * S >= 2**31:
        return f"{call.num_blocks} blocks of {call.num_kv_heads} * {S} rows are 2**31 rows or more"
    return None


def kernel_of(call: Call, products: type[Products]) -> Kernel:
    """The kernel for a call that is not `refused`."""
    tuning = call.options.tuning
    if tuning is None:
        tuning = default_tuning(call)
    if not isinstance(tuning, Tuning):
        raise ValueError(f"tuning must be a Tuning, got {tuning}")
    tiles = Tiles(
        heads=tuning.kv_heads,
        group=call.num_heads // call.num_kv_heads,
        num_queries=call.num_queries,
        columns=tuning.query_columns,
        tokens=tuning.block_kv,
        chunk=min(call.block_size, tuning.block_kv),
        head_size=call.head_size,
        joined=tuning.kv_heads == 1 or tuning.block_kv >= call.block_size,
    )
    num_stages, num_splits = tuning.num_stages, tuning.num_splits
    return Kernel(tiles, call.options, num_stages, num_splits, uses_tma(call.target), products)
