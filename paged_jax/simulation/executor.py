"""An executor that computes nothing: it asks a cost model for the time and lets it pass.

How much memory beams share depends on how soon all of them descend from one again. That is decided
by how sure the model is of the next token, and by how alike beams are in this: where all are sure,
the beams go on side by side; where one is not, its branches replace the others. `Branching` draws
next tokens such that beams branch and die as a model's do. Each beam draws

- the log-odds of its likeliest token from a normal distribution, correlated between the beams of
  a search, which have most of their text in common;
- the rest of the probability falls off with the rank to the power of `tail_exponent` (Zipf).

The defaults were fitted to beam searches of width 2, 4 and 6 by SmolLM2-135M-Instruct over
ShareGPT prompts of 27 to 213 tokens, 96 output tokens each: 6,080 rows of candidates. There the
log-odds have mean 2.24 and deviation 3.18 and correlate by 0.44 between beams; of the probability
that likelier tokens leave, the 2nd to 6th take 0.35, 0.22, 0.16, 0.14 and 0.11 in the median, where
the power below gives 0.29, 0.21, 0.16, 0.13 and 0.11. `experiments.paper.fig15_memory_sharing` puts
real searches beside simulated searches of the same lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.interface import MemoryManager
from paged_jax.outputs import TokenLogprobs
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Sequence as Beam
from paged_jax.simulation.cost_model import CostModel, StepWork

VOCAB_SIZE = 50_000


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
        """Let time pass until `time_s`."""
        if not (math.isfinite(time_s) and time_s >= self._now):
            raise ValueError(f"the clock cannot go from {self._now} s to {time_s} s")
        self._now = time_s


@dataclass(frozen=True)
class Branching:
    """The distribution of next tokens."""

    log_odds_mean: float = 2.24
    log_odds_deviation: float = 3.18
    correlation: float = 0.44  # between the log-odds of one search's beams in one step
    tail_exponent: float = 1.7

    def draw(
        self, rng: np.random.Generator, searches: Sequence[int], num_candidates: int
    ) -> NDArray[np.float64]:
        """Log-probabilities of each beam's likeliest tokens, `[beams, num_candidates]`.

        `searches`: for each beam, which search it belongs to, counted from 0.
        """
        common = rng.standard_normal(1 + max(searches, default=0))[list(searches)]
        own = rng.standard_normal(len(searches))
        mixed = np.sqrt(self.correlation) * common + np.sqrt(1 - self.correlation) * own
        log_odds = self.log_odds_mean + self.log_odds_deviation * mixed
        tail = np.arange(2, 1 + VOCAB_SIZE, dtype=float) ** -self.tail_exponent
        tail /= tail.sum()
        first = -np.logaddexp(0, -log_odds)[:, None]
        rest = -np.logaddexp(0, log_odds)[:, None] + np.log(tail[: num_candidates - 1])
        return -np.sort(-np.concatenate([first, rest], axis=1), axis=1)


class BeamCandidates:
    """Candidates for the beams of searches, as steps report them."""

    def __init__(self, rng: np.random.Generator, branching: Branching | None = None):
        self._rng = rng
        self._branching = branching or Branching()

    def draw(self, beams: Sequence[Beam]) -> list[TokenLogprobs]:
        """A row for each beam of a step, whichever searches they belong to."""
        numbers: dict[str, int] = {}
        searches = [numbers.setdefault(b.request.request_id, len(numbers)) for b in beams]
        counts = [b.request.beam_search.num_candidates for b in beams if b.request.beam_search]
        rows = self._branching.draw(self._rng, searches, max(counts))
        return [
            # Which tokens they are does not matter: the tokens of one beam differ by their rank.
            TokenLogprobs(row[0], tuple(enumerate(row[:count])))
            for row, count in zip(rows.tolist(), counts, strict=True)
        ]


class SimulatedExecutor(Executor):
    """Answers each batch at once, and moves the clock by the time that `cost` says it takes.

    Tokens are filler that no prompt holds. Each sequence has a token of its own, so that no two
    sequences find each other's generated blocks in the prefix cache, and a preempted sequence finds
    its own. Beams get candidates from `beams`.
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
