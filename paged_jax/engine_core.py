"""The loop: schedule, execute, update. Knows neither text nor models."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.usage import MemoryUsage
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Sequence
from paged_jax.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class IterationStats:
    """One iteration, as a researcher wants to plot it. Times in seconds."""

    index: int
    start_s: float
    wall_s: float  # from schedule to update
    device_s: float  # of which the executor was busy
    num_decodes: int
    num_prefill_tokens: int
    num_prefill_seqs: int
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
    end_s: float


class EngineCore:
    """Drives one scheduler and one executor; `on_iteration` sees the statistics of every turn."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_iteration: Callable[[IterationStats], None] | None = None,
    ):
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.on_iteration = on_iteration
        self.num_iterations = 0

    def step(self) -> Iteration:
        """One iteration; call it while the scheduler has work."""
        start = self.clock()
        scheduler = self.scheduler
        batch = scheduler.schedule()
        usage = scheduler.memory_usage() if self.on_iteration else None
        result = self.executor.execute(batch)
        finished = scheduler.update(batch, result.tokens)
        sampled = batch.decodes
        if batch.prefills:
            sampled = sampled + [chunk.seq for chunk in batch.prefills if chunk.completes]
        end = self.clock()
        if self.on_iteration and usage:
            self.on_iteration(
                IterationStats(
                    index=self.num_iterations,
                    start_s=start,
                    wall_s=end - start,
                    device_s=result.device_s,
                    num_decodes=len(batch.decodes),
                    num_prefill_tokens=batch.num_prefill_tokens,
                    num_prefill_seqs=len(batch.prefills),
                    num_preempted=len(batch.preempted),
                    num_finished=len(finished),
                    num_running=scheduler.num_running,
                    num_waiting=scheduler.num_waiting,
                    usage=usage,
                )
            )
        self.num_iterations += 1
        return Iteration(batch, sampled, result, finished, end)
