"""Iterations that the device works on, one after the other, while the host plans the next.

    host      plan t  plan t+1           take t  plan t+2         take t+1  plan t+3
    device          |------- t ---------|------- t+1 -----------|------- t+2 ---------

The host plans iteration t+1 and hands it over before it asks for the tokens of t, so that the
device goes on without a pause; the tokens reach t+1 on the device. At most two batches are in
flight. Where the plan depends on the tokens (`Scheduler.schedule_ahead`) the host waits.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from paged_jax.executor.interface import Executor, Pending, PipelinedExecutor, StepResult
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request, Sequence, SequenceStatus
from paged_jax.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class InFlightBatch:
    """A batch that has been planned; a batch that was planned ahead is dispatched as well."""

    batch: ScheduledBatch
    start_s: float  # when its planning began; if planned ahead, when the iteration before it ended
    is_ahead: bool = False
    pending: Pending | None = None
    error: Exception | None = None  # what its dispatch ahead raised

    @property
    def is_wanted(self) -> bool:
        """Whether any sequence that it computes is unfinished."""
        seqs = (*self.batch.decodes, *(chunk.seq for chunk in self.batch.prefills))
        return not all(seq.is_finished for seq in seqs)


class Pipeline:
    """Plans iterations and runs them; if `is_pipelined`, each before the one before has ended."""

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
        self._next: InFlightBatch | None = None

    @property
    def has_next(self) -> bool:
        """Whether a batch that was planned ahead is in flight."""
        return self._next is not None

    def take(self) -> InFlightBatch:
        """The batch whose turn it is: the one in flight, or else a new plan.

        A batch in flight is dropped if all its sequences have ended; the device computes it all
        the same.
        """
        in_flight, self._next = self._next, None
        if in_flight is not None and in_flight.is_wanted:
            return in_flight
        start = self._clock()
        return InFlightBatch(self._scheduler.schedule(), start)

    def run(self, current: InFlightBatch) -> StepResult:
        """Wait for the result of the batch that `take` returned, and plan the next one meanwhile.

        Raises what the executor raised.
        """
        if current.error is not None:
            raise current.error
        if not self._is_pipelined:
            return self.executor.execute(current.batch)
        executor = cast(PipelinedExecutor, self.executor)
        if current.pending is None:
            current.pending = executor.dispatch(current.batch)
        batch = self._scheduler.schedule_ahead(current.batch)
        if batch is not None:
            self._next = InFlightBatch(batch, current.start_s, is_ahead=True)
            try:
                self._next.pending = executor.dispatch(batch, after=current.pending)
            except Exception as error:
                self._next.error = error  # raised in its turn: the current batch may yet succeed
        return current.pending.result()

    def note_end(self, time_s: float) -> None:
        """The current batch has ended at `time_s`; the device works on the next from then on."""
        if self._next is not None:
            self._next.start_s = time_s

    def clear(self) -> None:
        """Forget the batch that was planned behind one that failed."""
        self._next = None


def live_rows(batch: ScheduledBatch, result: StepResult) -> tuple[list[Sequence], StepResult]:
    """The batch's `sampled` sequences that have not ended meanwhile, and the result for them.

    A sequence that has ended got one token too many: its batch was planned before its last token
    was known.
    """
    sampled = batch.sampled
    live = [index for index, seq in enumerate(sampled) if not seq.is_finished]
    if len(live) == len(sampled):
        return sampled, result
    failed = result.failed
    return [sampled[index] for index in live], replace(
        result,
        tokens=[result.tokens[index] for index in live],
        logprobs=[result.logprobs[index] for index in live],
        failed={at: failed[index] for at, index in enumerate(live) if index in failed},
    )


# After a step that raised


def recover(scheduler: Scheduler, executor: Executor) -> bool:
    """Make the next plan do the work of an iteration that raised; returns if the cache was lost.

    The cache is donated to each step, so a step that fails may lose it. The scheduler then plans
    all tokens again, except those whose blocks are swapped out.
    """
    is_lost = executor.cache_is_lost
    num_pinned = scheduler.memory.num_pinned_blocks
    scheduler.recover(cache_lost=is_lost)
    if is_lost:
        executor.reset_cache()
    if is_lost and num_pinned:
        warnings.warn(
            f"the KV cache was lost, and with it the pinned prefixes in {num_pinned} blocks: pin "
            "them again",
            RuntimeWarning,
            stacklevel=2,
        )
    return is_lost


def carry_over(failed: ScheduledBatch, batch: ScheduledBatch) -> None:
    """Add the preempted and resumed sequences of a failed batch to the batch that replaces it.

    The scheduler has preempted and resumed them, though the failed batch computed nothing.
    """
    running = SequenceStatus.RUNNING
    batch.preempted = failed.preempted + batch.preempted
    batch.resumed = [seq for seq in failed.resumed if seq.status is running] + batch.resumed


def requests_of(batch: ScheduledBatch) -> list[Request]:
    """The requests whose tokens a batch computes or whose blocks it moves, each once."""
    sequences = [*batch.decodes, *(chunk.seq for chunk in batch.prefills), *batch.resumed]
    swapped = SequenceStatus.SWAPPED
    sequences += [seq for seq in batch.preempted if seq.status is swapped]
    return list({seq.request.request_id: seq.request for seq in sequences}.values())
