"""When requests arrive: at once, as a Poisson or a burstier process, or as the trace has them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paged_jax.workloads.request import WorkloadRequest

# Bounds of the coefficient of variation: beyond them all come at once, or like clockwork.
MIN_CV, MAX_CV = 0.01, 100.0


def _require_positive(value: float, name: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value}")


def arrive_at_once(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """All requests arrive at 0."""
    return [replace(request, arrival_s=0.0) for request in requests]


def arrive_poisson(
    requests: Sequence[WorkloadRequest], *, rate: float, seed: int
) -> list[WorkloadRequest]:
    """Exponential gaps of mean 1 / `rate` (requests/s); the first precedes the first request."""
    return arrive_gamma(requests, rate=rate, cv=1.0, seed=seed)


def arrive_gamma(
    requests: Sequence[WorkloadRequest], *, rate: float, cv: float, seed: int
) -> list[WorkloadRequest]:
    """Gamma-distributed gaps of mean 1 / `rate` (requests/s) and coefficient of variation `cv`.

    Above 1 arrivals are burstier than a Poisson process, below 1 steadier. Gaps of one seed are
    the same at any rate up to scale, and those of n requests begin those of n + 1, so systems and
    rates are compared on the same arrivals.
    """
    _require_positive(rate, "the request rate")
    if not MIN_CV <= cv <= MAX_CV:
        raise ValueError(f"cv must lie between {MIN_CV} and {MAX_CV}, got {cv}")
    # The tag keeps the gaps independent of lengths and prompts drawn from the same seed.
    rng = np.random.default_rng([seed, 0x61727276])
    gaps = rng.standard_gamma(cv**-2, len(requests)) * (cv**2 / rate)
    return [
        replace(request, arrival_s=time)
        for request, time in zip(requests, np.cumsum(gaps).tolist(), strict=True)
    ]


def arrive_as_traced(
    requests: Sequence[WorkloadRequest], *, speedup: float = 1.0
) -> list[WorkloadRequest]:
    """Requests arrive as in the trace, the first at 0, `speedup` times as fast."""
    _require_positive(speedup, "the trace speed-up")
    start = requests[0].arrival_s if requests else 0.0
    return [replace(r, arrival_s=(r.arrival_s - start) / speedup) for r in requests]


def speedup_to(requests: Sequence[WorkloadRequest], rate: float) -> float:
    """How much faster a trace has to run for `rate` requests/s from its first to its last."""
    _require_positive(rate, "the request rate")
    span_s = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    if span_s <= 0:
        raise ValueError(
            f"{len(requests)} requests within {span_s:g} s have no rate that could be scaled"
        )
    return rate * span_s / (len(requests) - 1)
