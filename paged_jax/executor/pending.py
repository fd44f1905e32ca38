"""An iteration that the device has been given and has not answered yet."""

import time
from collections.abc import Callable

import jax
import numpy as np

from paged_jax.executor.interface import StepResult
from paged_jax.executor.logprobs import sampled_logprobs
from paged_jax.sampling import Sampled
from paged_jax.scheduling.logprobs import TokenLogprobs
from paged_jax.scheduling.request import Sequence


class Pending:
    """Steps in flight; the host is free until it asks for their `result`.

    The device works on one iteration after the other: the time of one that was dispatched `after`
    another counts from when that one's tokens were back.
    """

    def __init__(
        self,
        steps: list[tuple[list[Sequence], Sampled]],  # those that sample, and for whom
        last: jax.Array | None,  # what is computed last, unless it is sampled
        score: Callable[[], list[list[TokenLogprobs]]],  # of the prompts' own tokens
        *,
        start_s: float,  # when the first step was dispatched, by `time.perf_counter`
        swap_s: float = 0.0,  # seconds since then that went by swapping
        after: "Pending | None" = None,
    ):
        self.steps = steps
        self._last = last
        self._score = score
        self._start_s = start_s
        self._swap_s = swap_s
        self._after = after
        self._end_s = start_s
        for _, sampled in steps:
            for array in (sampled.tokens, sampled.is_finite):
                array.copy_to_host_async()

    def result(self) -> StepResult:
        """Wait for the tokens. Raises what the device's steps raised."""
        if self._last is not None:
            self._last.block_until_ready()
        scored = self._score()
        tokens: list[int] = []
        failed: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for seqs, sampled in self.steps:
            is_finite = np.asarray(sampled.is_finite)[: len(seqs)]
            failed += (np.flatnonzero(~is_finite) + len(tokens)).tolist()
            tokens += np.asarray(sampled.tokens)[: len(seqs)].tolist()
            logprobs += sampled_logprobs(seqs, sampled)
        self._end_s = time.perf_counter()
        start_s = self._start_s
        if self._after is not None:
            start_s = max(start_s, self._after._end_s)
            self._after = None  # which keeps its own arrays
        device_s = self._end_s - start_s
        return StepResult(tokens, logprobs, device_s, scored, failed, self._swap_s)
