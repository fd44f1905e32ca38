"""What a real run is timed by."""

import time
from typing import Protocol


class RunClock(Protocol):
    """Seconds, and a way to be idle."""

    def __call__(self) -> float:
        """Now."""

    def idle_until(self, time_s: float) -> None:
        """Let time pass without work."""


class WallClock:
    """Time as it passes. Whatever else the machine does makes a run longer."""

    def __call__(self) -> float:
        return time.perf_counter()

    def idle_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self()))


class CpuClock:
    """Time that the process computes, summed over its threads; idle time is skipped.

    Runs compare with each other on a machine that is busy with other things.
    """

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._skipped_s

    def idle_until(self, time_s: float) -> None:
        self._skipped_s += max(0.0, time_s - self())


CLOCKS: dict[str, type[RunClock]] = {"wall": WallClock, "cpu": CpuClock}
