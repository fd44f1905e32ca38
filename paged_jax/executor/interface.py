"""What the engine asks of an executor, real or simulated."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from paged_jax.outputs import TokenLogprobs
from paged_jax.scheduling.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """One iteration's outcome: a token for each of the batch's `sampled`."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]  # aligned with tokens; None where not asked for
    # Seconds from the first dispatch, or from when the tokens of the iteration before were back if
    # that ran still, until the tokens are back.
    device_s: float
    # For each prefill, in order, those of its prompt's tokens that its request asked for and still
    # lacked; empty if no request did.
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    # Indices into tokens of those that mean nothing, as the logits they come from are not finite.
    failed: list[int] = field(default_factory=list)
    swap_s: float = 0.0  # of device_s, until blocks were swapped out and in


class Executor(Protocol):
    """Runs an iteration. Scheduler and memory manager cannot tell which kind this is.

    One that keeps nothing on a device inherits from this what is about losing it.
    """

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute the batch, whose slots are allocated, and sample."""

    @property
    def cache_is_lost(self) -> bool:
        """After an iteration that raised: whether all that the cache held went with it."""
        return False

    def reset_cache(self) -> None:
        """Put an empty cache in place of one that is lost."""
        return


class Pending(Protocol):
    """An iteration that has been dispatched."""

    def result(self) -> StepResult:
        """Wait for its tokens; raises what its steps raise."""


class PipelinedExecutor(Executor, Protocol):
    """Runs an iteration while the host plans the next one."""

    def dispatch(self, batch: ScheduledBatch, *, after: Any = None) -> Pending:
        """Start an iteration, to be run when those dispatched before it are through.

        ``after``: what the dispatch of the iteration before it returned, if the host has not taken
        its tokens yet: each decode's input is the token that it samples for that sequence.
        """
