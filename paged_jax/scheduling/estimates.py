"""Estimates of what iterations cost, in seconds, learnt from executed iterations."""

from collections import deque
from statistics import median
from typing import Protocol

import numpy as np

from paged_jax.scheduling.batch import ScheduledBatch

_WINDOW = 32  # iterations of a kind that are remembered


class StepTimes(Protocol):
    """What an executor reports of an iteration."""

    @property
    def device_s(self) -> float:
        """Seconds of the whole iteration, swaps included."""

    @property
    def swap_s(self) -> float:
        """Seconds of these for swapping blocks out and in."""


class StepEstimates:
    """Running estimates over the last iterations of each kind.

    They are medians, so that a step that had to be compiled first, or was held up, does not count.
    An estimate is None as long as nothing has been measured for it.
    """

    def __init__(self) -> None:
        self._decodes: deque[float] = deque(maxlen=_WINDOW)  # seconds of an iteration's decode step
        self._prefills: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # (tokens, seconds)
        self._swaps: deque[float] = deque(maxlen=_WINDOW)  # seconds per block
        self._prefill_line: tuple[float, float] | None = None  # fitted to `_prefills`

    def observe(self, batch: ScheduledBatch, times: StepTimes) -> None:
        """Take in an executed iteration."""
        num_swapped = len(batch.swap_outs) + len(batch.swap_ins)
        if num_swapped:
            self._swaps.append(times.swap_s / num_swapped)
        seconds = max(0.0, times.device_s - times.swap_s)
        if not batch.prefills:
            if batch.decodes:
                self._decodes.append(seconds)
            return
        if batch.decodes:
            seconds = max(0.0, seconds - (self.decode_s or 0.0))
        self._prefills.append((batch.num_prefill_tokens, seconds))
        self._prefill_line = None

    @property
    def decode_s(self) -> float | None:
        """Seconds of an iteration's decode step."""
        return median(self._decodes) if self._decodes else None

    @property
    def swapped_block_s(self) -> float | None:
        """Seconds to move a block between device and host, in either direction."""
        return median(self._swaps) if self._swaps else None

    @property
    def prefill_token_s(self) -> float | None:
        """Seconds of each token of a prefill, beside the fixed part of its step."""
        return self._line()[1] if self._prefills else None

    def prefill_s(self, num_tokens: int) -> float | None:
        """Seconds of a prefill step of `num_tokens` tokens."""
        if not self._prefills:
            return None
        fixed_s, token_s = self._line()
        return fixed_s + token_s * num_tokens

    def prefill_tokens_within(self, seconds: float) -> int | None:
        """The most tokens with which a prefill step takes no longer; 0 or less if none do."""
        if not self._prefills:
            return None
        fixed_s, token_s = self._line()
        return int((seconds - fixed_s) / token_s)

    def _line(self) -> tuple[float, float]:
        """(seconds a step, seconds a token) by Theil and Sen: medians of slopes, then of rests."""
        if self._prefill_line is None:
            tokens, seconds = np.array(self._prefills).T
            first, second = np.triu_indices(len(tokens), 1)
            steps = tokens[second] - tokens[first]
            differ = steps != 0
            if differ.any():
                slopes = (seconds[second] - seconds[first])[differ] / steps[differ]
                slope = float(np.median(slopes))
            else:
                slope = 0.0
            # All prefills have one size, or the slope is noise: the tokens take all of the time.
            if slope <= 0:
                slope = max(float(np.median(seconds / tokens)), 1e-12)
            fixed = max(0.0, float(np.median(seconds - slope * tokens)))
            self._prefill_line = fixed, slope
        return self._prefill_line
