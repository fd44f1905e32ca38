"""Paged attention in Pallas Mosaic GPU with wgmma, for sm_90 alone; `mosaic_gpu` in all else.

Operands stay in shared memory, which leaves registers to larger tiles. Whether that pays where
copies are the bottleneck, as in decoding, is for measurements to say.
"""

from jax import Array

from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call

from .api import (
    attend_by,
    cache_head_size,
    default_tuning,
    kernel_of,
    refused,
)
from .products import WgmmaProducts

__all__ = ["attend", "cache_head_size", "default_tuning", "refusal"]


def refusal(call: Call) -> str | None:
    """Why the kernel cannot do the call; None if it can. ValueError for a foreign tuning."""
    if reason := refused(call):
        return reason
    if call.target is not None and call.target.compute_capability != (9, 0):
        return f"wgmma is of compute capability 9.0 alone, which a {call.target.name} has not"
    return kernel_of(call, WgmmaProducts).misfit(call)


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
    inputs = (q, k_cache, v_cache, block_tables, context_lens, query_starts)
    return attend_by(WgmmaProducts, *inputs, options=options)
