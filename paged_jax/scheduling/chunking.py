"""Chunked prefill: how many tokens of which prompts an iteration computes beside its decodes."""

import collections.abc
from bisect import bisect_left

from paged_jax.config import EngineConfig
from paged_jax.scheduling.batch import PrefillChunk
from paged_jax.scheduling.estimates import StepEstimates
from paged_jax.scheduling.request import Sequence


def prefill_budget(
    num_decodes: int, config: EngineConfig, estimates: StepEstimates, *, least_tokens: int
) -> int:
    """How many tokens of prefill an iteration may have beside `num_decodes` decodes.

    Decodes count against `max_num_batched_tokens`, except where prompts are computed whole: any
    prompt fits beside any decodes then. A `target_inter_token_s` holds prefill back while
    sequences decode, but leaves at least `least_tokens`.
    """
    if not config.enable_chunked_prefill:
        return config.max_num_batched_tokens
    budget = config.max_num_batched_tokens - num_decodes
    target_s = config.target_inter_token_s
    if target_s is None or not num_decodes:
        return budget
    num_tokens = estimates.prefill_tokens_within(target_s - (estimates.decode_s or 0.0))
    return budget if num_tokens is None else min(budget, max(num_tokens, least_tokens))


class PrefillPlan:
    """The prefill chunks of one iteration.

    They have `budget` tokens in all, and are at most `max_prefill_seqs`. Where prompts are computed
    whole, the first prompt always fits, and the plan takes the next one only as a whole.
    """

    __slots__ = ("_is_chunked", "_max_chunks", "budget", "chunks")

    def __init__(self, budget: int, config: EngineConfig):
        self.chunks: list[PrefillChunk] = []
        self.budget = budget  # tokens that are left
        self._max_chunks = config.max_prefill_seqs
        self._is_chunked = config.enable_chunked_prefill

    @property
    def has_room(self) -> bool:
        return self.budget > 0 and len(self.chunks) < self._max_chunks

    def may_take(self, num_tokens: int) -> bool:
        """Whether there is room for a prompt with `num_tokens` tokens still to compute."""
        return self.has_room and (self._is_chunked or num_tokens <= self.budget)

    def add(self, seq: Sequence, num_in_flight: int = 0) -> None:
        """Plan as much of the sequence's prefill as there is room for.

        The batch in flight computes `num_in_flight` tokens of it beyond those computed already.
        """
        start = seq.num_computed_tokens + num_in_flight
        num_tokens = len(seq.token_ids) - start
        if not num_tokens:
            return
        if num_tokens > self.budget:
            if not self._is_chunked:
                self.budget = 0  # no later prompt overtakes this one
                return
            num_tokens = self.budget
        self.chunks.append(PrefillChunk(seq, start, num_tokens))
        self.budget -= num_tokens

    def cut_to(self, sizes: collections.abc.Sequence[int]) -> None:
        """Leave tokens for the next iteration where too much of the step would be padding.

        The executor pads a step to the next of its `sizes`, which ascend. Where padding would be a
        quarter of the step or more, the last chunks are cut down to the size below.
        """
        num_tokens = sum(chunk.num_tokens for chunk in self.chunks)
        at = bisect_left(sizes, num_tokens)
        if not 0 < at < len(sizes) or 4 * num_tokens > 3 * sizes[at]:
            return
        excess = num_tokens - sizes[at - 1]
        while excess > 0:
            chunk = self.chunks.pop()
            if chunk.num_tokens > excess:
                rest = PrefillChunk(chunk.seq, chunk.start, chunk.num_tokens - excess)
                self.chunks.append(rest)
            excess -= chunk.num_tokens
