"""Prometheus' metric families as plain data, for a scrape, a table or a test to read."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

# Bounds of histograms, as vLLM has them; in seconds where the name ends so.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FEW = (1, 2, 5, 10, 20)


def up_to(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... as far as `limit` goes."""
    steps = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= limit)


class Histogram:
    """Counts values by the smallest bound that is no less, or else in a last bucket."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[int]:
        """How many values each bucket holds with all before it; the last holds all."""
        return list(accumulate(self._counts))


@dataclass(frozen=True, slots=True)
class Sample:
    """A value, and the labels that tell it from the other samples of its family."""

    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def key(self) -> str:
        """`name{label="value"}`, as Prometheus prints it."""
        if not self.labels:
            return self.name
        inside = ",".join(f'{label}="{value}"' for label, value in sorted(self.labels.items()))
        return f"{self.name}{{{inside}}}"


@dataclass(frozen=True, slots=True)
class Family:
    """The samples of one metric. A counter's name stands without the `_total` of its samples."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[Sample, ...]


def gauge(name: str, description: str, value: float) -> Family:
    return Family(name, "gauge", description, (Sample(name, {}, float(value)),))


def counter(name: str, description: str, value: float) -> Family:
    return Family(name, "counter", description, (Sample(f"{name}_total", {}, float(value)),))


def counters(name: str, description: str, label: str, values: Mapping[str, float]) -> Family:
    """A counter for each value of a label."""
    samples = [Sample(f"{name}_total", {label: key}, float(n)) for key, n in values.items()]
    return Family(name, "counter", description, tuple(samples))


def info(name: str, description: str, labels: Mapping[str, str]) -> Family:
    """Facts, as the labels of a gauge that is always 1."""
    return Family(name, "gauge", description, (Sample(name, dict(labels), 1.0),))


def histogram(name: str, description: str, values: Histogram) -> Family:
    cumulative = values.cumulative()
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    buckets = [
        Sample(f"{name}_bucket", {"le": bound}, float(count))
        for bound, count in zip(bounds, cumulative, strict=True)
    ]
    count = Sample(f"{name}_count", {}, float(cumulative[-1]))
    return Family(
        name, "histogram", description, (*buckets, count, Sample(f"{name}_sum", {}, values.sum))
    )


def flat(families: Iterable[Family]) -> dict[str, float]:
    """All samples by their keys."""
    return {sample.key: sample.value for family in families for sample in family.samples}
