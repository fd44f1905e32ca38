"""Tail latency of a run, and how many of its requests were served as promised."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from experiments.lib.driver import ServedRequest, ServedRun
from experiments.lib.serving_figures import outcome
from paged_jax.workloads import WorkloadRequest
from paged_jax.workloads.request import VocabRange, random_token_ids


@dataclass(frozen=True)
class Mix:
    """Every `long_every`-th request has a long prompt; lengths in tokens."""

    num_requests: int
    long_every: int
    long_prompt: int
    long_output: int
    short_prompt: int  # mean; from half to one and a half of it, uniformly; likewise for outputs
    short_output: int

    @property
    def max_len(self) -> int:
        """The longest prompt and output together."""
        longest_short = 3 * (self.short_prompt + self.short_output) // 2
        return max(self.long_prompt + self.long_output, longest_short)

    def requests(self, vocab: VocabRange, seed: int) -> list[WorkloadRequest]:
        """Random tokens, no two prompts alike; all of fixed lengths, there at the start."""
        rng = np.random.default_rng(seed)
        found = []
        for index in range(self.num_requests):
            if index % self.long_every == self.long_every // 2:
                num_prompt, num_output = self.long_prompt, self.long_output
            else:
                num_prompt = _around(rng, self.short_prompt)
                num_output = _around(rng, self.short_output)
            prompt = tuple(random_token_ids(rng, num_prompt, vocab))
            found.append(WorkloadRequest(prompt, num_output))
        return found

    def num_long(self, requests: Sequence[WorkloadRequest]) -> int:
        return sum(request.num_prompt_tokens == self.long_prompt for request in requests)


def _around(rng: np.random.Generator, mean: int) -> int:
    return int(rng.integers(max(1, mean // 2), max(1, 3 * mean // 2) + 1))


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
