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
        """One iteration; call it while the scheduler has work, then `report` it."""
        start = self.clock()
        batch = self.scheduler.schedule()
        usage = self.scheduler.memory_usage() if self.on_iteration else None
        result = self.executor.execute(batch)
        end = self.clock()
        finished = self.scheduler.update(
            batch, result.tokens, result.logprobs, result.prompt_logprobs
        )
        return Iteration(batch, batch.sampled, result, finished, usage, start, end)

    def report(self, iteration: Iteration) -> None:
        """Give an iteration's statistics to the observer, after its outputs were handed over."""
        index = self.num_iterations
        self.num_iterations += 1
        if self.on_iteration is None or iteration.usage is None:
            return
        batch = iteration.batch
        self.on_iteration(
            IterationStats(
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
        )
