"""What observers of an engine see: each iteration, its statistics, and what becomes of requests.

`IterationLog`, at the end, is the smallest of them: copy it for one of your own.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol, TextIO

from paged_jax.executor.interface import StepResult
from paged_jax.memory.usage import MemoryUsage
from paged_jax.outputs import RequestOutput
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request, Sequence
from paged_jax.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One iteration, as a researcher wants to plot it. Times in seconds."""

    index: int
    start_s: float  # if planned ahead, when the tokens of the iteration before were there
    wall_s: float  # from start_s until the next iteration starts, or all outputs are made
    device_s: float  # the part of wall_s from the first dispatch until the tokens were back
    num_decodes: int
    num_prefill_tokens: int
    num_prefill_seqs: int
    num_sampled: int
    num_preempted: int
    num_finished: int
    num_running: int  # after the iteration
    num_waiting: int
    usage: MemoryUsage  # while it ran
    num_resumed: int = 0  # sequences swapped in
    num_swapped: int = 0  # sequences in host memory, after the iteration
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    swap_s: float = 0.0  # the part of device_s that went by swapping
    num_free_blocks: int = 0  # after the iteration, cached ones included
    num_cached_blocks: int = 0
    num_used_swap_blocks: int = 0
    is_ahead: bool = False  # whether it was planned while the iteration before it ran


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one turn of the loop did; `sampled` are the sequences that `result` has tokens for.

    Sequences of the batch that ended before this iteration are left out: it was planned ahead of
    their last token. If the iteration's step has failed for good, the batch is empty.
    """

    batch: ScheduledBatch
    sampled: list[Sequence]
    result: StepResult
    finished: list[Sequence]
    usage: MemoryUsage | None  # while it ran; None if no observer wants statistics
    start_s: float
    end_s: float  # when its tokens were there
    failed: list[Request] = field(default_factory=list)  # each with its `error`
    is_ahead: bool = False  # whether it was planned while the iteration before it ran


class Observer:
    """Sees what an engine does and changes nothing; a subclass overrides the calls that it needs.

    It is called in the engine's thread, so the time that it takes is time without tokens. An
    observer that raises sees no more, a warning says so, and the engine goes on. Times are in
    seconds on the engine's clock.
    """

    wants_stats = False  # whether `on_iteration` is called: counting slots takes time

    def on_request_added(self, request: Request) -> None:
        """A request waits."""

    def on_request_refused(self, error: ValueError) -> None:
        """A request was not taken; its caller gets the error."""

    def on_step(self, iteration: Iteration) -> None:
        """The scheduler has an iteration's tokens; their outputs are not made yet."""

    def on_recovery(self, time_s: float) -> None:
        """A step has raised: nothing of it counts, and sequences that ran may wait again."""

    def on_request_ended(self, output: RequestOutput, time_s: float) -> None:
        """A request has ended, for whatever reason, and its output is about to be handed over."""

    def on_iteration(self, stats: IterationStats) -> None:
        """An iteration is over and its outputs are made."""

    def close(self) -> None:
        """There is no more to see."""


class Observed(Protocol):
    """The part of an engine's core that its observers may look at."""

    scheduler: Scheduler
    clock: Callable[[], float]  # seconds
    observers: list[Observer]


@contextmanager
def watch(core: Observed, *observers: Observer) -> Iterator[None]:
    """The observers see what the engine does inside, and are closed at the end.

    An observer knows nothing of requests that were added before: begin to watch an idle engine.
    """
    core.observers += observers
    try:
        yield
    finally:
        core.observers = [each for each in core.observers if each not in observers]
        for observer in observers:
            observer.close()


def open_output(path: str | Path, *, by_line: bool = False) -> TextIO:
    """A new file; each line is in it at once if `by_line`. ValueError if it cannot be written."""
    try:
        return Path(path).open("w", buffering=1 if by_line else -1)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


class IterationLog(Observer):
    """Writes `IterationStats` to a file, a line each: `{"index": 0, "start_s": 1.5, ...}`.

    "usage" says how the slots were used, and "ended" which requests have ended since the line
    before, with their reasons. Every line is in the file when its iteration is over.

    path: the log's file; ValueError if it cannot be written.
    """

    wants_stats = True

    def __init__(self, path: str | Path):
        self._file = open_output(path, by_line=True)
        self._ended: dict[str, str | None] = {}

    def on_request_ended(self, output: RequestOutput, time_s: float) -> None:
        self._ended[output.request_id] = output.error or output.finish_reason

    def on_iteration(self, stats: IterationStats) -> None:
        line = {name: getattr(stats, name) for name in _FIELDS}
        line["usage"] = {name: getattr(stats.usage, name) for name in _USAGE_FIELDS}
        line["ended"], self._ended = self._ended, {}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


_FIELDS = [each.name for each in fields(IterationStats)]
_USAGE_FIELDS = [each.name for each in fields(MemoryUsage)]
