"""Figures under their names, whatever reads them: a scrape, a table, a test."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from paged_jax.observability.histogram import Histogram


@dataclass(frozen=True, slots=True)
class Sample:
    """A value and what tells it from the others of its family."""

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
