"""Attention over a paged KV cache: one entry, several implementations under one contract."""

from pallas_kernels.paged_attention.api import (
    IMPLEMENTATIONS,
    paged_attention,
    paged_prefill_attention,
    resolve,
)

__all__ = ["IMPLEMENTATIONS", "paged_attention", "paged_prefill_attention", "resolve"]
