"""Attention that leaves the last token of each context out."""

from typing import Any

from jax import Array

from pallas_kernels.paged_attention import AttentionResult, reference


def attend(*arguments: Array, **options: Any) -> AttentionResult:
    *others, context_lens, query_starts = arguments
    return reference.attend(*others, context_lens - 1, query_starts, **options)
