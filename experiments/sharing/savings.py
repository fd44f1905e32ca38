"""What sharing saves, measured on any engine, real or simulated."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments import reporting
from paged_jax.executor.interface import Executor, StepResult
from paged_jax.memory.usage import MemoryUsage
from paged_jax.scheduling.batch import ScheduledBatch


def saved_fraction(usages: Iterable[MemoryUsage]) -> float:
    """Blocks saved by sharing over blocks without sharing (Kwon et al., section 6.3).

    Both are summed over the snapshots: where more memory is in use, it weighs more.
    """
    shared = used = 0
    for usage in usages:
        shared += usage.shared
        used += usage.total - usage.free
    if not shared + used:
        raise ValueError("no memory was used, so none can have been saved")
    return shared / (shared + used)


def num_tokens_apart(beams: Sequence[Sequence[int]]) -> int:
    """How many tokens ago, counted to the last one, these beams of equal length were one."""
    tokens = np.array(beams)
    differs = (tokens != tokens[0]).any(axis=0)
    return len(differs) - int(differs.argmax()) if differs.any() else 0


class BeamObserver(Executor):
    """An executor that notes, at each step of each search, for how long its beams are apart."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self._tokens_apart: list[int] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        searches: dict[str, list[list[int]]] = {}
        for seq in batch.decodes:
            if seq.request.beam_search is not None:
                searches.setdefault(seq.request.request_id, []).append(seq.token_ids)
        self._tokens_apart += [
            num_tokens_apart(beams) for beams in searches.values() if len(beams) > 1
        ]
        return self._executor.execute(batch)

    @property
    def cache_is_lost(self) -> bool:
        return self._executor.cache_is_lost

    def reset_cache(self) -> None:
        self._executor.reset_cache()

    def take(self) -> dict[str, Any]:
        """Mean and percentiles since the last call."""
        tokens_apart, self._tokens_apart = self._tokens_apart, []
        return reporting.spread(tokens_apart, percents=(50, 90))
