"""After an iteration that raised: a state from which the next one can be planned."""

import warnings

from paged_jax.executor.interface import Executor
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request, SequenceStatus
from paged_jax.scheduling.scheduler import Scheduler


def recover(scheduler: Scheduler, executor: Executor) -> None:
    """Forget what the iteration was to do, and the cache if it went with it.

    The cache is donated to each step: one that fails may have taken it. Then all that was computed
    is computed again, but for what is swapped out.
    """
    is_lost = executor.cache_is_lost
    num_pinned = scheduler.memory.num_pinned_blocks
    scheduler.recover(cache_lost=is_lost)
    if not is_lost:
        return
    executor.reset_cache()
    if num_pinned:
        warnings.warn(
            f"the KV cache was lost, and with it the pinned prefixes in {num_pinned} blocks: pin "
            "them again",
            RuntimeWarning,
            stacklevel=2,
        )


def carry_over(failed: ScheduledBatch, batch: ScheduledBatch) -> None:
    """Note in the plan that follows a failed one whom that has preempted and resumed.

    That stands, though what was to be computed is planned again.
    """
    running = SequenceStatus.RUNNING
    batch.preempted = failed.preempted + batch.preempted
    batch.resumed = [seq for seq in failed.resumed if seq.status is running] + batch.resumed


def requests_of(batch: ScheduledBatch) -> list[Request]:
    """Those that a batch computes or moves, each once."""
    sequences = [*batch.decodes, *(chunk.seq for chunk in batch.prefills), *batch.resumed]
    swapped = SequenceStatus.SWAPPED
    sequences += [seq for seq in batch.preempted if seq.status is swapped]
    return list({seq.request.request_id: seq.request for seq in sequences}.values())
