"""An executor that computes nothing: it asks a cost model for the time and lets it pass."""

import math

from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.interface import MemoryManager
from paged_jax.outputs import TokenLogprobs
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.simulation.branching import BeamCandidates
from paged_jax.simulation.cost_model import CostModel, StepWork


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


class SimulatedExecutor(Executor):
    """Answers each batch at once, after the time that `cost` says has passed on the clock.

    Tokens are filler that no prompt holds. Each sequence has its own, so that no two sequences
    find each other's generated blocks in the prefix cache; one that was preempted finds its own.
    Beams get candidates from `beams`.
    """

    def __init__(
        self, memory: MemoryManager, cost: CostModel, clock: VirtualClock, beams: BeamCandidates
    ):
        self._memory = memory
        self._cost = cost
        self._clock = clock
        self._beams = beams

    def execute(self, batch: ScheduledBatch) -> StepResult:
        work = StepWork.of(batch, self._memory.block_size)
        swap_s = 0.0
        if work.num_swapped_blocks:
            self._memory.take_swaps()
            swap_s = self._cost.swap_s(work.num_swapped_blocks, work.block_size)
        if batch.copies:
            self._memory.take_copies()
        seconds = self._cost.step_s(work)
        self._clock.advance(seconds)
        sampled = batch.sampled
        tokens = [-1 - seq.seq_id for seq in sampled]
        logprobs: list[TokenLogprobs | None] = [None] * len(sampled)
        beams = [i for i, seq in enumerate(sampled) if seq.is_beam]
        if beams:
            for i, row in zip(beams, self._beams.draw([sampled[i] for i in beams]), strict=True):
                logprobs[i] = row
        return StepResult(tokens, logprobs, seconds, swap_s=swap_s)
