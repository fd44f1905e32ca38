"""Figures of two sides, round by round: their ratio, its interval, and what that says."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from experiments.lib.driver import ServedRun
from experiments.lib.serving_figures import latencies, outcome

Verdict = Literal["ok", "worse", "unclear", "none"]


@dataclass(frozen=True, slots=True)
class Figure:
    """What is compared of a run; None where the run has no such figure."""

    name: str
    of: Callable[[ServedRun], float | None]
    more_is_better: bool


@dataclass(frozen=True, slots=True)
class Ratio:
    """Candidate over baseline: the geometric mean of the rounds, and the interval of that mean."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of both sides. The verdict is "none" where neither side has it."""

    figure: str
    baseline: float | None  # median of the rounds
    candidate: float | None
    ratio: Ratio | None
    limit: float  # what the ratio may be, at least or at most
    verdict: Verdict


def paired_ratio(baseline: Sequence[float], candidate: Sequence[float], confidence: float) -> Ratio:
    """The ratio of positive figures of two rounds or more, by Student's t on their logarithms."""
    logs = np.log(np.divide(candidate, baseline))
    mean = float(np.mean(logs))
    quantile = float(special.stdtrit(len(logs) - 1, (1 + confidence) / 2))
    half_width = quantile * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half_width), math.exp(mean + half_width))


def judge(ratio: Ratio, limit: float, *, more_is_better: bool) -> Verdict:
    """`ok` or `worse` only if the whole interval is on that side of the limit."""
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
    """One figure of all rounds; only rounds in which both sides have it count."""
    rounds = list(zip(map(figure.of, baseline), map(figure.of, candidate), strict=True))
    both = [(before, after) for before, after in rounds if before and after]
    if len(both) < 2:
        has_any = any(value for pair in rounds for value in pair)
        return Compared(figure.name, None, None, None, limit, "unclear" if has_any else "none")
    befores, afters = zip(*both, strict=True)
    ratio = paired_ratio(befores, afters, confidence)
    return Compared(
        figure.name,
        float(np.median(befores)),
        float(np.median(afters)),
        ratio,
        limit,
        judge(ratio, limit, more_is_better=figure.more_is_better),
    )


def _throughput(run: ServedRun) -> float:
    outputs = [served.output for served in run.served if served.output is not None]
    return sum(len(out.token_ids) for output in outputs for out in output.outputs) / run.wall_s


def _latency(name: str, percentile: str) -> Callable[[ServedRun], float | None]:
    def of(run: ServedRun) -> float | None:
        complete = [each.output for each in run.served if each.output and outcome(each) is None]
        value: float | None = latencies(complete)[name][percentile]
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
