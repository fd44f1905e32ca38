"""The contract between the engine and an executor, real or simulated."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from paged_jax.outputs import TokenLogprobs
from paged_jax.scheduling.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """One iteration's outcome: a token for each of the batch's `sampled`."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]  # aligned with tokens; None where not asked for
    # Seconds until the tokens are back, from the first dispatch, or from when the tokens of the
    # iteration before were back, if that is later.
    device_s: float
    # For each prefill, in order, the log-probabilities of the prompt's tokens that its request
    # still lacked; empty if no request asks for any.
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    # By index into tokens, why this token means nothing: its request is to fail.
    failed: dict[int, str] = field(default_factory=dict)
    swap_s: float = 0.0  # the part of device_s that went by swapping blocks


class Executor(Protocol):
    """Runs an iteration. Scheduler and memory manager cannot tell which kind this is.

    An executor without a cache on a device inherits `cache_is_lost` and `reset_cache`.
    """

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute the batch, whose slots are allocated, and sample."""

    @property
    def cache_is_lost(self) -> bool:
        """Whether an iteration that raised has taken the cache with it."""
        return False

    def reset_cache(self) -> None:
        """Put an empty cache in place of the lost one."""
        return


class Pending(Protocol):
    """An iteration that has been dispatched."""

    def result(self) -> StepResult:
        """Wait for its tokens; raises what its steps raise."""


class PipelinedExecutor(Executor, Protocol):
    """Runs an iteration while the host plans the next one."""

    def dispatch(self, batch: ScheduledBatch, *, after: Any = None) -> Pending:
        """Start an iteration, to be run once the iterations dispatched before it are through.

        after: the iteration before, as its dispatch returned it, if the host does not have its
            tokens yet. Each decode computes the token that this iteration samples for it.
        """
