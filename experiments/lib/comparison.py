"""Two sides serve the same in rounds: where their outputs differ, and how their figures compare."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

from experiments.lib.driver import ServedRequest, ServedRun
from experiments.lib.serving_figures import (
    complete_outputs,
    latencies,
    num_output_tokens,
    outcome,
)

Verdict = Literal["ok", "worse", "unclear", "none"]


# Outputs


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose outputs differ. `token` counts output tokens from 0."""

    request_id: str
    continuation: int | None  # None: one of the two was not served
    token: int | None  # None: all tokens are equal, and the sequences end for other reasons
    baseline: str
    candidate: str


def differences(
    baseline: Sequence[ServedRequest], candidate: Sequence[ServedRequest]
) -> Iterator[Difference]:
    """The first difference of each request that has one, in their order."""
    for before, after in zip(baseline, candidate, strict=True):
        difference = _difference(before, after)
        if difference is not None:
            yield difference


def _difference(before: ServedRequest, after: ServedRequest) -> Difference | None:
    request_id = before.request_id
    if before.output is None or after.output is None:
        if before.output is after.output:
            return None
        return Difference(request_id, None, None, _state(before), _state(after))
    pairs = zip(before.output.outputs, after.output.outputs, strict=True)
    for index, (one, other) in enumerate(pairs):
        at = first_difference(one.token_ids, other.token_ids)
        if at is not None:
            return Difference(
                request_id, index, at, _token(one.token_ids, at), _token(other.token_ids, at)
            )
        if one.finish_reason != other.finish_reason:
            return Difference(
                request_id, index, None, str(one.finish_reason), str(other.finish_reason)
            )
    return None


def earliest(found: list[Difference]) -> Difference:
    """The difference at the earliest token; requests that were not served come first."""
    return min(found, key=lambda each: -1 if each.continuation is None else each.token or 0)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two sequences of tokens part, perhaps because one ends; None if they are equal."""
    for at, (token, other_token) in enumerate(zip(one, other, strict=False)):
        if token != other_token:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def _token(token_ids: Sequence[int], at: int) -> str:
    return str(token_ids[at]) if at < len(token_ids) else "(ended)"


def _state(served: ServedRequest) -> str:
    found = outcome(served)
    return "served" if found is None else ": ".join(filter(None, found))


# Figures


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that is compared; `of` gives None for a run that has none."""

    name: str
    of: Callable[[ServedRun], float | None]
    more_is_better: bool


@dataclass(frozen=True, slots=True)
class Ratio:
    """Candidate over baseline: the geometric mean of the rounds, and the interval of that mean."""

    mean: float
    low: float
    high: float


class Compared(NamedTuple):
    """A figure of both sides: a row of the table."""

    figure: str
    baseline: float | None  # median of the rounds
    candidate: float | None
    ratio: float | None  # candidate over baseline, between low and high
    low: float | None
    high: float | None
    limit: float  # the ratio may be this, at least or at most
    verdict: Verdict  # "none" where neither side has the figure


def paired_ratio(baseline: Sequence[float], candidate: Sequence[float], confidence: float) -> Ratio:
    """The ratio of positive figures in two rounds or more, by Student's t on their logarithms."""
    logs = np.log(np.divide(candidate, baseline))
    mean = float(np.mean(logs))
    quantile = float(special.stdtrit(len(logs) - 1, (1 + confidence) / 2))
    half_width = quantile * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half_width), math.exp(mean + half_width))


def judge(ratio: Ratio, limit: float, *, more_is_better: bool) -> Verdict:
    """The verdict is "ok" or "worse" only if the whole interval is on that side of the limit."""
    if more_is_better:
        is_ok, is_worse = ratio.low >= limit, ratio.high < limit
    else:
        is_ok, is_worse = ratio.high <= limit, ratio.low > limit
    return "ok" if is_ok else "worse" if is_worse else "unclear"


def compare_figure(
    figure: Figure,
    baseline: Sequence[ServedRun],
    candidate: Sequence[ServedRun],
    *,
    limit: float,
    confidence: float,
) -> Compared:
    """One figure over all rounds; a round counts only if both sides have the figure."""
    rounds = list(zip(map(figure.of, baseline), map(figure.of, candidate), strict=True))
    both = [(before, after) for before, after in rounds if before and after]
    if len(both) < 2:
        verdict: Verdict = "unclear" if any(any(pair) for pair in rounds) else "none"
        return Compared(figure.name, None, None, None, None, None, limit, verdict)
    befores, afters = zip(*both, strict=True)
    ratio = paired_ratio(befores, afters, confidence)
    return Compared(
        figure.name,
        float(np.median(befores)),
        float(np.median(afters)),
        ratio.mean,
        ratio.low,
        ratio.high,
        limit,
        judge(ratio, limit, more_is_better=figure.more_is_better),
    )


def _throughput(run: ServedRun) -> float:
    return num_output_tokens(run) / run.wall_s


def _latency(name: str, percentile: str) -> Callable[[ServedRun], float | None]:
    def of(run: ServedRun) -> float | None:
        value: float | None = latencies(complete_outputs(run))[name][percentile]
        return value

    return of


FIGURES = (
    Figure("output tokens/s", _throughput, more_is_better=True),
    *(
        Figure(f"{title}, {percentile} (s)", _latency(name, percentile), more_is_better=False)
        for name, title in (
            ("ttft_s", "time to first token"),
            ("inter_token_s", "token to token"),
            ("normalised_latency_s", "per output token, waiting included"),
        )
        for percentile in ("p50", "p99")
    ),
)
