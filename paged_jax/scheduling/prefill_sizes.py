"""Prefill steps of the sizes that the executor computes without padding."""

from bisect import bisect_left
from collections.abc import Sequence

from paged_jax.scheduling.batch import PrefillChunk


def fit_to_sizes(prefills: list[PrefillChunk], sizes: Sequence[int]) -> None:
    """Leave tokens for the next iteration where too much of the step would be padding.

    The executor fills up a step to the next of its `sizes`, which ascend. Where that is a quarter
    of it or more, the last chunks are cut down to the size below.
    """
    num_tokens = sum(chunk.num_tokens for chunk in prefills)
    at = bisect_left(sizes, num_tokens)
    if not 0 < at < len(sizes) or 4 * num_tokens > 3 * sizes[at]:
        return
    excess = num_tokens - sizes[at - 1]
    while excess > 0:
        chunk = prefills.pop()
        if chunk.num_tokens > excess:
            prefills.append(PrefillChunk(chunk.seq, chunk.start, chunk.num_tokens - excess))
        excess -= chunk.num_tokens
