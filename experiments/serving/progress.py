"""The progress bar of a run."""

from types import TracebackType
from typing import Self

from tqdm import tqdm

from paged_jax.engine_core import IterationStats

_REDRAW_S = 0.25


class ServingProgress:
    """Requests that have ended; tokens/s, sequences running and waiting, use of the KV pool."""

    def __init__(self, num_requests: int):
        self._bar = tqdm(total=num_requests, desc="serving", unit="request")
        self._start_s: float | None = None
        self._drawn_s = 0.0
        self._num_tokens = 0

    def advance(self, num_ended: int) -> None:
        """Requests that ended."""
        self._bar.update(num_ended)

    def show(self, stats: IterationStats) -> None:
        """Take in an iteration; its figures are drawn a few times a second."""
        if self._start_s is None:
            self._start_s = stats.start_s
        self._num_tokens += stats.num_sampled
        now = stats.start_s + stats.wall_s
        if now - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = now
        usage = stats.usage
        self._bar.set_postfix_str(
            f"{self._num_tokens / (now - self._start_s):.0f} tokens/s, "
            f"{stats.num_running} running, {stats.num_waiting} waiting, "
            f"KV {1 - (usage.free + usage.external) / usage.total:.0%}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()
