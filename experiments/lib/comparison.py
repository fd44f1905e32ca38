"""Two sides serve the same in rounds: where their outputs differ, and how their figures compare."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np
from scipy import special

from experiments.lib.driver import ServedRequest, ServedRun
from experiments.lib.serving_figures import complete_outputs, latencies, num_output_tokens, outcome
from paged_jax import CompletionOutput

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
        if before.output and after.output:
            pairs = zip(before.output.outputs, after.output.outputs, strict=True)
            found = ((i, *parts) for i, pair in enumerate(pairs) if (parts := _parting(*pair)))
            if (first := next(found, None)) is not None:
                yield Difference(before.request_id, *first)
        elif before.output is not after.output:
            yield Difference(before.request_id, None, None, _state(before), _state(after))


def _parting(one: CompletionOutput, other: CompletionOutput) -> tuple[int | None, str, str] | None:
    """Where two continuations part, and what each has there."""
    at = first_difference(one.token_ids, other.token_ids)
    if at is not None:
        return at, _token(one, at), _token(other, at)
    reasons = str(one.finish_reason), str(other.finish_reason)
    return (None, *reasons) if reasons[0] != reasons[1] else None


def earliest(found: list[Difference]) -> Difference:
    """The difference at the earliest token; requests that were not served come first."""
    return min(found, key=lambda each: -1 if each.continuation is None else each.token or 0)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two sequences of tokens part, perhaps because one ends; None if they are equal."""
    pairs = enumerate(zip_longest(one, other))
    return next((at for at, (token, other_token) in pairs if token != other_token), None)


def _token(out: CompletionOutput, at: int) -> str:
    return str(out.token_ids[at]) if at < len(out.token_ids) else "(ended)"


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


class Ratio(NamedTuple):
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
    sign = 1 if more_is_better else -1
    margins = [sign * (bound - limit) for bound in (ratio.low, ratio.high)]
    return "ok" if min(margins) >= 0 else "worse" if max(margins) < 0 else "unclear"


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
    both = [(one, other) for one, other in rounds if one and other]
    if len(both) < 2:
        verdict: Verdict = "unclear" if any(any(pair) for pair in rounds) else "none"
        return Compared(figure.name, None, None, None, None, None, limit, verdict)
    befores, afters = zip(*both, strict=True)
    ratio = paired_ratio(befores, afters, confidence)
    verdict = judge(ratio, limit, more_is_better=figure.more_is_better)
    medians = float(np.median(befores)), float(np.median(afters))
    return Compared(figure.name, *medians, *ratio, limit, verdict)


def _latency(name: str, percentile: str) -> Callable[[ServedRun], float | None]:
    return lambda run: latencies(complete_outputs(run))[name][percentile]


FIGURES = (
    Figure("output tokens/s", lambda run: num_output_tokens(run) / run.wall_s, more_is_better=True),
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
