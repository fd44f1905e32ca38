"""What the engine asks of an executor, real or simulated."""

from dataclasses import dataclass
from typing import Protocol

from paged_jax.scheduling.batch import ScheduledBatch, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """One iteration's outcome: a token for each of the batch's `sampled`."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]  # aligned with tokens; None where not asked for
    device_s: float  # seconds from the first dispatch until the tokens are back


class Executor(Protocol):
    """Runs an iteration. Scheduler and memory manager cannot tell which kind this is."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute the batch, whose slots are allocated, and sample."""
