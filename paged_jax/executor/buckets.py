"""The static shapes that steps are compiled for."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

# Below this many tokens a step is bound by reading the weights, so padding costs no time.
MIN_PREFILL_TOKENS = 16


def min_rows(platform: str, dtype: np.dtype[Any]) -> int:
    """The fewest rows of a step that multiplies by weights of this dtype.

    XLA's CPU products of a single row in bfloat16 take ten times as long as those of two.
    """
    return 2 if platform == "cpu" and dtype.name == "bfloat16" else 1


def decode_buckets(max_num_seqs: int, least: int = 1) -> list[int]:
    """Rows of a decode step, at least `least`: powers of two up to 16, then two a doubling."""
    buckets = [rows for rows in (1, 2, 4, 8) if rows >= least]
    base = 16
    while base < max_num_seqs:
        buckets += [base, base * 3 // 2]
        base *= 2
    return [*(b for b in buckets if b < max_num_seqs), max_num_seqs]


def prefill_buckets(max_num_tokens: int) -> list[int]:
    """Tokens of a prefill step, two for each doubling.

    The scheduler avoids the lower half between two buckets, where more than a quarter of a step
    would be padding.
    """
    buckets = [MIN_PREFILL_TOKENS, 2 * MIN_PREFILL_TOKENS]
    base = 4 * MIN_PREFILL_TOKENS
    while base < max_num_tokens:
        buckets += [base, base * 3 // 2]
        base *= 2
    return [*(b for b in buckets if b < max_num_tokens), max_num_tokens]


def bucket_of(buckets: Sequence[int], size: int) -> int:
    """The smallest bucket that holds `size`."""
    return buckets[bisect_left(buckets, size)]


def padded(values: Sequence[int], size: int) -> np.ndarray:
    """`i32[size]`: the values, then zeros."""
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out
