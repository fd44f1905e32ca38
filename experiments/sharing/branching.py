"""An executor without a model or a clock, for what memory decides alone."""

import numpy as np

from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.logprobs import TokenLogprobs
from paged_jax.simulation.branching import VOCAB_SIZE, BeamCandidates, Branching


class BranchingExecutor(Executor):
    """Computes nothing: random tokens for samples, candidates by `branching` for beams."""

    def __init__(self, memory: MemoryManager, *, seed: int, branching: Branching | None = None):
        self._memory = memory
        self._rng = np.random.default_rng(seed)
        self._beams = BeamCandidates(self._rng, branching)

    def execute(self, batch: ScheduledBatch) -> StepResult:
        self._memory.take_copies()
        sampled = batch.sampled
        tokens: list[int] = self._rng.integers(VOCAB_SIZE, size=len(sampled)).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(sampled)
        beams = [i for i, seq in enumerate(sampled) if seq.request.beam_search is not None]
        if beams:
            for i, row in zip(beams, self._beams.draw([sampled[i] for i in beams]), strict=True):
                logprobs[i] = row
        return StepResult(tokens, logprobs, 0.0)
