"""The loop: schedule, execute, update. Knows neither text nor models."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.usage import MemoryUsage
from paged_jax.outputs import RequestOutput
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request, Sequence
from paged_jax.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One iteration, as a researcher wants to plot it. Times in seconds."""

    index: int
    start_s: float
    wall_s: float  # from schedule to the last output handed over
    device_s: float  # of which from the first dispatch until the tokens were back
    num_decodes: int
    num_prefill_tokens: int
    num_prefill_seqs: int
    num_sampled: int
    num_preempted: int
    num_finished: int
    num_running: int  # after the iteration
    num_waiting: int
    usage: MemoryUsage  # while it ran


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one turn of the loop did; ``sampled`` are the sequences that `result` has tokens for."""

    batch: ScheduledBatch
    sampled: list[Sequence]
    result: StepResult
    finished: list[Sequence]
    usage: MemoryUsage | None  # while it ran; None if nobody observes
    start_s: float
    end_s: float  # when its tokens were there


class Observer:
    """Sees what an engine does and changes nothing of it; what it has no use for does nothing.

    It is called in the engine's thread, so the time that it takes is time without tokens. Times are
    in seconds on the engine's clock.
    """

    wants_stats = False  # whether `on_iteration` is called: counting slots takes time

    def on_request_added(self, request: Request) -> None:
        """A request waits."""

    def on_request_refused(self, error: ValueError) -> None:
        """A request was not taken; its caller gets the error."""

    def on_step(self, iteration: Iteration) -> None:
        """An iteration's tokens are there and the scheduler has them, but nobody else."""

    def on_request_ended(self, output: RequestOutput, time_s: float) -> None:
        """A request has ended, for whatever reason, and its output is about to be handed over."""

    def on_iteration(self, stats: IterationStats) -> None:
        """An iteration is over and its outputs are handed over."""


class EngineCore:
    """Drives one scheduler and one executor.

    `observers` see all that happens; `on_iteration` is a function that only gets the statistics of
    every turn.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_iteration: Callable[[IterationStats], None] | None = None,
        observers: Iterable[Observer] = (),
    ):
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.on_iteration = on_iteration
        self.observers = list(observers)
        self.num_iterations = 0

    def add(self, request: Request) -> None:
        """Queue a request; ValueError as `Scheduler.add`."""
        self.scheduler.add(request)
        for observer in self.observers:
            observer.on_request_added(request)

    def note_ended(self, output: RequestOutput) -> None:
        """Tell the observers that a request has ended."""
        now = self.clock()
        for observer in self.observers:
            observer.on_request_ended(output, now)

    @property
    def _wants_stats(self) -> bool:
        return self.on_iteration is not None or any(each.wants_stats for each in self.observers)

    def step(self) -> Iteration:
        """One iteration; call it while the scheduler has work, then `report` it."""
        start = self.clock()
        batch = self.scheduler.schedule()
        usage = self.scheduler.memory_usage() if self._wants_stats else None
        result = self.executor.execute(batch)
        end = self.clock()
        finished = self.scheduler.update(
            batch, result.tokens, result.logprobs, result.prompt_logprobs
        )
        iteration = Iteration(batch, batch.sampled, result, finished, usage, start, end)
        for observer in self.observers:
            observer.on_step(iteration)
        return iteration

    def report(self, iteration: Iteration) -> None:
        """Give an iteration's statistics to the observers, after its outputs were handed over."""
        index = self.num_iterations
        self.num_iterations += 1
        if iteration.usage is None:
            return
        batch = iteration.batch
        stats = IterationStats(
            index=index,
            start_s=iteration.start_s,
            wall_s=self.clock() - iteration.start_s,
            device_s=iteration.result.device_s,
            num_decodes=len(batch.decodes),
            num_prefill_tokens=batch.num_prefill_tokens,
            num_prefill_seqs=len(batch.prefills),
            num_sampled=len(iteration.sampled),
            num_preempted=len(batch.preempted),
            num_finished=sum(seq.is_finished for seq in iteration.sampled),
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            usage=iteration.usage,
        )
        if self.on_iteration is not None:
            self.on_iteration(stats)
        for observer in self.observers:
            if observer.wants_stats:
                observer.on_iteration(stats)
