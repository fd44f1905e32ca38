"""When requests arrive: all at once, as a Poisson process, or as the trace has them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paged_jax.workloads.request import WorkloadRequest


def _require_positive(value: float, name: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value}")


def arrive_at_once(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    return [replace(request, arrival_s=0.0) for request in requests]


def arrive_poisson(
    requests: Sequence[WorkloadRequest], *, rate: float, seed: int
) -> list[WorkloadRequest]:
    """Exponential gaps of mean 1 / `rate` (requests/s); the first precedes the first request.

    Gaps of one seed are the same at any rate up to scale, and those of n requests begin those
    of n + 1, so systems and rates are compared on the same arrivals.
    """
    _require_positive(rate, "the request rate")
    # The tag keeps the gaps independent of lengths and prompts drawn from the same seed.
    rng = np.random.default_rng([seed, 0x61727276])
    times = np.cumsum(rng.standard_exponential(len(requests))) / rate
    return [
        replace(request, arrival_s=time)
        for request, time in zip(requests, times.tolist(), strict=True)
    ]


def arrive_as_traced(
    requests: Sequence[WorkloadRequest], *, speedup: float = 1.0
) -> list[WorkloadRequest]:
    """The trace's own times, the first request at 0, `speedup` times as fast."""
    _require_positive(speedup, "the trace speed-up")
    start = requests[0].arrival_s if requests else 0.0
    return [replace(r, arrival_s=(r.arrival_s - start) / speedup) for r in requests]
