"""Virtual time."""

import math


class VirtualClock:
    """Seconds since the start of a simulated run; called like `time.perf_counter`.

    It moves only when it is told to, and only forwards: ValueError for anything else.
    """

    __slots__ = ("_now",)

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"time cannot pass by {seconds} s; a step's time is at least 0")
        self._now += seconds

    def advance_to(self, time_s: float) -> None:
        """Let time pass until then."""
        if not (math.isfinite(time_s) and time_s >= self._now):
            raise ValueError(f"the clock cannot go from {self._now} s to {time_s} s")
        self._now = time_s
