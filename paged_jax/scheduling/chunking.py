"""Chunked prefill: how many tokens of which prompts an iteration computes beside its decodes."""

import collections.abc
from bisect import bisect_left

from paged_jax.scheduling.batch import PrefillChunk
from paged_jax.scheduling.estimates import StepEstimates
from paged_jax.scheduling.request import Sequence


def fit_to_sizes(prefills: list[PrefillChunk], sizes: collections.abc.Sequence[int]) -> None:
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


class PrefillPlan:
    """The chunks of one iteration, within its limits.

    budget: tokens of prefill that are left; max_chunks: chunks, at most; is_chunked: whether a
    prompt may be cut. Otherwise the first always fits, and the next ones do if all of them does.
    """

    __slots__ = ("_is_chunked", "_max_chunks", "budget", "chunks")

    def __init__(self, budget: int, max_chunks: int, *, is_chunked: bool):
        self.chunks: list[PrefillChunk] = []
        self.budget = budget
        self._max_chunks = max_chunks
        self._is_chunked = is_chunked

    @property
    def has_room(self) -> bool:
        return self.budget > 0 and len(self.chunks) < self._max_chunks

    def may_take(self, num_tokens: int) -> bool:
        """Whether there is room for a prompt of which so many tokens are still to be computed."""
        return self.has_room and (self._is_chunked or num_tokens <= self.budget)

    def add(self, seq: Sequence, num_in_flight: int = 0) -> None:
        """Plan as much of the sequence's prefill as there is room for.

        `num_in_flight`: tokens beyond those computed whose computation is under way.
        """
        start = seq.num_computed_tokens + num_in_flight
        num_tokens = len(seq.token_ids) - start
        if not num_tokens:
            return
        if num_tokens > self.budget:
            if not self._is_chunked:
                self.budget = 0  # nobody goes before it
                return
            num_tokens = self.budget
        self.chunks.append(PrefillChunk(seq, start, num_tokens))
        self.budget -= num_tokens


class PrefillBudget:
    """How many tokens of prefill an iteration may have.

    max_num_batched_tokens: tokens of an iteration, decodes included. Where prompts are not cut,
        decodes do not count, so that any prompt fits beside any decodes.
    target_inter_token_s: what an iteration with decodes should take at most, None: any time. By
        it prefill is held back, as far as its `least_tokens`.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        *,
        is_chunked: bool,
        target_inter_token_s: float | None,
        least_tokens: int,
        estimates: StepEstimates,
    ):
        self._max_tokens = max_num_batched_tokens
        self._is_chunked = is_chunked
        self._target_s = target_inter_token_s
        self._least_tokens = least_tokens
        self._estimates = estimates

    def beside(self, num_decodes: int) -> int:
        """Tokens of prefill, beside so many decodes."""
        if not self._is_chunked:
            return self._max_tokens
        budget = self._max_tokens - num_decodes
        if self._target_s is None or not num_decodes:
            return budget
        rest_s = self._target_s - (self._estimates.decode_s or 0.0)
        num_tokens = self._estimates.prefill_tokens_within(rest_s)
        if num_tokens is None:
            return budget
        return min(budget, max(num_tokens, self._least_tokens))
