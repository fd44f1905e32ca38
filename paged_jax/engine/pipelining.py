"""Iterations that the device works on, one after the other, while the host plans the next.

    host      plan t  plan t+1           take t  plan t+2         take t+1  plan t+3
    device          |------- t ---------|------- t+1 -----------|------- t+2 ---------

The host plans iteration t+1 and hands it over before it asks for the tokens of t, so that the
device goes on without a pause; the tokens reach t+1 on the device. No more than two iterations are
in flight. Where the plan depends on the tokens (`Scheduler.schedule_ahead`) the host waits.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from paged_jax.executor.interface import Executor, Pending, PipelinedExecutor, StepResult
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus
from paged_jax.scheduling.scheduler import Scheduler


def recover(scheduler: Scheduler, executor: Executor) -> None:
    """Forget what the iteration was to do, and the cache if it went with it.

    The cache is donated to each step: one that fails may have taken it. Then all that was computed
    is computed again, but for what is swapped out.
    """
    is_lost = executor.cache_is_lost
    num_pinned = scheduler.memory.num_pinned_blocks
    scheduler.recover(cache_lost=is_lost)
    if not is_lost:
        return
    executor.reset_cache()
    if num_pinned:
        warnings.warn(
            f"the KV cache was lost, and with it the pinned prefixes in {num_pinned} blocks: pin "
            "them again",
            RuntimeWarning,
            stacklevel=2,
        )


def carry_over(failed: ScheduledBatch, batch: ScheduledBatch) -> None:
    """Note in the plan that follows a failed one whom that has preempted and resumed.

    That stands, though what was to be computed is planned again.
    """
    running = SequenceStatus.RUNNING
    batch.preempted = failed.preempted + batch.preempted
    batch.resumed = [seq for seq in failed.resumed if seq.status is running] + batch.resumed


def requests_of(batch: ScheduledBatch) -> list[Request]:
    """Those that a batch computes or moves, each once."""
    sequences = [*batch.decodes, *(chunk.seq for chunk in batch.prefills), *batch.resumed]
    swapped = SequenceStatus.SWAPPED
    sequences += [seq for seq in batch.preempted if seq.status is swapped]
    return list({seq.request.request_id: seq.request for seq in sequences}.values())


@dataclass(slots=True)
class Flight:
    """An iteration that has been planned; one planned ahead has been dispatched as well."""

    batch: ScheduledBatch
    start_s: float  # when its planning began; if planned ahead, when the iteration before it ended
    is_ahead: bool = False
    pending: Pending | None = None
    error: Exception | None = None  # what dispatching it ahead raised

    @property
    def is_wanted(self) -> bool:
        """Whether anybody that it was planned for is still there."""
        seqs = (*self.batch.decodes, *(chunk.seq for chunk in self.batch.prefills))
        return not all(seq.is_finished for seq in seqs)


class Pipeline:
    """Plans iterations and runs them; if ``is_pipelined``, each before the one before has ended."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float],
        *,
        is_pipelined: bool,
    ):
        self._scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._is_pipelined = is_pipelined
        self._next: Flight | None = None

    @property
    def has_next(self) -> bool:
        """Whether an iteration that was planned ahead is under way."""
        return self._next is not None

    def take(self) -> Flight:
        """The iteration whose turn it is.

        If all for whom it was planned have ended meanwhile, what it computes is left to itself.
        """
        flight, self._next = self._next, None
        if flight is not None and flight.is_wanted:
            return flight
        start = self._clock()
        return Flight(self._scheduler.schedule(), start)

    def run(self, flight: Flight) -> StepResult:
        """Wait for the result of what `take` returned, planning the next one meanwhile.

        Raises what the executor raised.
        """
        if flight.error is not None:
            raise flight.error
        if not self._is_pipelined:
            return self.executor.execute(flight.batch)
        executor = cast(PipelinedExecutor, self.executor)
        if flight.pending is None:
            flight.pending = executor.dispatch(flight.batch)
        batch = self._scheduler.schedule_ahead(flight.batch)
        if batch is not None:
            self._next = Flight(batch, flight.start_s, is_ahead=True)
            try:
                self._next.pending = executor.dispatch(batch, after=flight.pending)
            except Exception as error:
                self._next.error = error  # when its turn comes: the one before may yet succeed
        return flight.pending.result()

    def note_end(self, time_s: float) -> None:
        """The result has been there since ``time_s``: from then on the device works on the next."""
        if self._next is not None:
            self._next.start_s = time_s

    def clear(self) -> None:
        """Forget what was planned behind an iteration that failed."""
        self._next = None


def live_rows(batch: ScheduledBatch, result: StepResult) -> tuple[list[Sequence], StepResult]:
    """The batch's `sampled`, and their results, without those that have ended meanwhile.

    Their token is one too many: it was planned before the one that ended them was known.
    """
    sampled = batch.sampled
    live = [index for index, seq in enumerate(sampled) if not seq.is_finished]
    if len(live) == len(sampled):
        return sampled, result
    failed = set(result.failed)
    return [sampled[index] for index in live], replace(
        result,
        tokens=[result.tokens[index] for index in live],
        logprobs=[result.logprobs[index] for index in live],
        failed=[at for at, index in enumerate(live) if index in failed],
    )
