"""Attention over a paged KV cache: one entry, several implementations under one contract."""

from pallas_kernels.paged_attention.api import (
    IMPLEMENTATIONS,
    cache_head_size,
    choose,
    paged_attention,
    paged_prefill_attention,
    refusal,
    resolve,
)
from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call
from pallas_kernels.registry import Unsupported

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionOptions",
    "AttentionResult",
    "Call",
    "Unsupported",
    "cache_head_size",
    "choose",
    "paged_attention",
    "paged_prefill_attention",
    "refusal",
    "resolve",
]
