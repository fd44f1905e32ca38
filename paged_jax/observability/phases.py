"""The phase of each unfinished request, from what happens to its sequences.

    waiting -> prefill -> running -> ended

A preemption leads back to waiting, to be recomputed, or to swapped, to go on later. A request may
end in any phase. A request of several sequences is running as long as one of them generates tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paged_jax.observability.observer import Iteration
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus

Phase = Literal["waiting", "prefill", "running", "swapped"]
PHASES = ("waiting", "prefill", "running", "swapped")
OnChange = Callable[[Request, Phase | None, Phase, float], None]


@dataclass(slots=True)
class _Current:
    request: Request
    phase: Phase
    since_s: float


class RequestPhases:
    """Follows requests from `add` to `end`.

    on_change: called with a request, the phase that it leaves (None: it is new), the phase that it
        enters and the time, in seconds on the engine's clock. A request's times never decrease.
    """

    def __init__(self, on_change: OnChange | None = None):
        self.num_requests: dict[str, int] = dict.fromkeys(PHASES, 0)
        self._on_change = on_change
        self._current: dict[str, _Current] = {}

    def __len__(self) -> int:
        return len(self._current)

    @property
    def requests(self) -> list[Request]:
        """The unfinished requests, in the order in which they were added."""
        return [current.request for current in self._current.values()]

    def add(self, request: Request) -> None:
        """A request waits, from its arrival on."""
        self._current[request.request_id] = _Current(request, "waiting", request.arrival_time)
        self.num_requests["waiting"] += 1
        if self._on_change is not None:
            self._on_change(request, None, "waiting", request.arrival_time)

    def follow(self, iteration: Iteration) -> None:
        """Take in what an iteration did; sequences that just go on decoding take no time."""
        batch, start = iteration.batch, iteration.start_s
        for seq in batch.preempted:
            self._enter(seq.request, _phase_at_rest(seq.request), start)
        for seq in batch.resumed:
            self._enter(seq.request, "prefill" if seq.is_prefilling else "running", start)
        for chunk in batch.prefills:
            request = chunk.seq.request
            if len(request.sequences) == 1 or self._phase(request) != "running":
                self._enter(request, "prefill", start)
        for chunk in batch.prefills:
            if chunk.completes:
                self._enter(chunk.seq.request, "running", iteration.end_s)
        for request in {seq.request.request_id: seq.request for seq in iteration.finished}.values():
            if not request.is_finished and not any(map(_runs, request.sequences)):
                self._enter(request, "waiting", iteration.end_s)

    def recover(self, time_s: float) -> None:
        """Look again at which requests still run, after a step that raised."""
        for request in self.requests:
            if not any(map(_runs, request.sequences)):
                self._enter(request, _phase_at_rest(request), time_s)

    def end(self, request_id: str, time_s: float) -> tuple[Request, float]:
        """Forget a request that has ended; returns it, and its end: not before its last phase."""
        current = self._current.pop(request_id)
        self.num_requests[current.phase] -= 1
        return current.request, max(time_s, current.since_s)

    def _phase(self, request: Request) -> Phase | None:
        current = self._current.get(request.request_id)
        return None if current is None else current.phase

    def _enter(self, request: Request, phase: Phase, time_s: float) -> None:
        current = self._current.get(request.request_id)
        if current is None or current.phase == phase:
            return
        before, current.phase = current.phase, phase
        self.num_requests[before] -= 1
        self.num_requests[phase] += 1
        current.since_s = max(time_s, current.since_s)
        if self._on_change is not None:
            self._on_change(request, before, phase, current.since_s)


def _runs(seq: Sequence) -> bool:
    return seq.status is SequenceStatus.RUNNING


def _phase_at_rest(request: Request) -> Phase:
    """The phase of a request none of whose sequences runs."""
    swapped = any(seq.status is SequenceStatus.SWAPPED for seq in request.sequences)
    return "swapped" if swapped else "waiting"
