"""Tail latency of a run, and how many of its requests were served as promised."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from experiments.serving.driver import ServedRequest, ServedRun
from experiments.serving.outcomes import outcome


class Objective(NamedTuple):
    """What a request is promised, in seconds."""

    ttft_s: float  # from its arrival to its first token, at most
    gap_s: float  # from each of its tokens to the next, at most

    def is_met(self, served: ServedRequest) -> bool:
        """Whether it got all its tokens, and got them in time."""
        if served.output is None or outcome(served) is not None:
            return False
        times = served.output.metrics.token_times_s[0]
        in_time = times[0] - served.output.metrics.arrival_s <= self.ttft_s
        return in_time and max(_gaps(times), default=0.0) <= self.gap_s


class Case(NamedTuple):
    """One system at one request rate. Times from a request's arrival or its last token on."""

    system: str
    rate: float  # requests/s that arrive
    requests: int
    refused: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    gap_p50_s: float | None  # between two tokens of a request, all requests together
    gap_p99_s: float | None
    gap_max_s: float | None
    tokens_per_s: float  # of output
    goodput: float  # requests/s that were served within the objective
    batch_size: float  # mean over the iterations
    largest_prefill: int  # tokens of prefill in an iteration beside decodes, at most


def case_of(system: str, rate: float, run: ServedRun, objective: Objective) -> Case:
    ttft: list[float] = []
    gaps: list[float] = []
    num_tokens = 0
    for served in run.served:
        if served.output is None:
            continue
        for times in filter(None, served.output.metrics.token_times_s):
            ttft.append(times[0] - served.output.metrics.arrival_s)
            gaps += _gaps(times)
            num_tokens += len(times)
    beside = [step.num_prefill_tokens for step in run.steps if step.num_decodes]
    return Case(
        system,
        rate,
        requests=len(run.served),
        refused=sum(served.output is None for served in run.served),
        ttft_p50_s=_percentile(ttft, 50),
        ttft_p99_s=_percentile(ttft, 99),
        gap_p50_s=_percentile(gaps, 50),
        gap_p99_s=_percentile(gaps, 99),
        gap_max_s=_percentile(gaps, 100),
        tokens_per_s=num_tokens / run.wall_s,
        goodput=sum(map(objective.is_met, run.served)) / run.wall_s,
        batch_size=float(np.mean([s.num_decodes + s.num_prefill_seqs for s in run.steps])),
        largest_prefill=max(beside, default=0),
    )


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
