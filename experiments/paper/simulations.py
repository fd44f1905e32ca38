"""One simulated run: a system of the paper's at a request rate, and what came of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from experiments.paper.requests import poisson_requests
from experiments.paper.setups import Deployment
from experiments.paper.systems import SYSTEMS
from paged_jax.sampling_params import SamplingParams
from paged_jax.simulation.run import simulate
from paged_jax.workloads import WorkloadRequest


@dataclass(frozen=True)
class Load:
    """A system and what it serves: plain data, which can travel between processes."""

    system: str
    deployment: Deployment
    lengths: str
    duration_s: float  # while requests arrive
    seed: int = 0
    block_size: int = 16
    enable_prefix_caching: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)

    def __str__(self) -> str:
        return f"{self.deployment.name}, {self.lengths}, {self.system}"

    def requests(self, rate: float) -> list[WorkloadRequest]:
        return poisson_requests(
            self.lengths,
            rate=rate,
            duration_s=self.duration_s,
            max_model_len=self.deployment.model.max_model_len,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Point:
    """A load at one rate. Averages are over time."""

    rate: float  # requests/s
    num_requests: int
    normalised_latency_s: float | None  # mean over requests; None: none has finished
    mean_batch_size: float
    output_tokens_per_s: float
    token_states: float  # fractions of the pool, as `MemoryUsage.shares`
    reserved: float
    internal: float
    external: float
    hit_rate: float  # of the prompt tokens, found in the prefix cache
    num_preemptions: int
    num_refused: int
    num_unfinished: int


def serve_at(load: Load, rate: float, *, cut: bool = False) -> Point:
    """Serve what arrives until `load.duration_s`, to its end, or `cut` there.

    Only a run to the end has a mean latency that does not leave out those that wait longest; only
    one that is cut has averages of the time at that rate alone.
    """
    deployment, system = load.deployment, SYSTEMS[load.system]
    requests = load.requests(rate)
    run = simulate(
        requests,
        system.config(
            deployment, load.block_size, enable_prefix_caching=load.enable_prefix_caching
        ),
        system.cost(deployment),
        params=load.params,
        horizon_s=load.duration_s if cut else None,
        seed=load.seed,
    )
    shares = run.memory_shares
    return Point(
        rate=rate,
        num_requests=len(requests),
        normalised_latency_s=run.normalised_latency_s,
        mean_batch_size=run.mean_batch_size,
        output_tokens_per_s=run.output_tokens_per_s,
        token_states=shares["token_states"],
        reserved=shares["reserved"],
        internal=shares["internal"],
        external=shares["external"],
        hit_rate=run.sharing.hit_rate,
        num_preemptions=run.num_preemptions,
        num_refused=run.num_refused,
        num_unfinished=run.num_unfinished,
    )


@dataclass(frozen=True)
class Sustained:
    """The highest rate at which a load's mean normalised latency stays within an objective."""

    load: Load
    objective_s: float
    rate: float | None  # requests/s; None: it does not, however slowly requests come
    points: list[Point]  # all runs of the search, by rate

    @property
    def latency_at_lowest(self) -> float | None:
        return self.points[0].normalised_latency_s


def find_sustained(
    load: Load, objective_s: float, *, precision: float = 0.02, fractions: Sequence[float] = ()
) -> Sustained:
    """Search by doubling or halving the rate, then by bisection until it is known to `precision`.

    `fractions` of the rate found are run as well, for a curve.
    """
    points: dict[float, Point] = {}

    def is_met(rate: float) -> bool:
        if rate not in points:
            points[rate] = serve_at(load, rate)
        latency = points[rate].normalised_latency_s
        return latency is not None and latency <= objective_s

    low, high = 0.0, first_rate(load)
    while low == 0.0 and high * load.duration_s >= MIN_REQUESTS:
        if is_met(high):
            low = high
        else:
            high /= 2
    if low == 0.0:
        return Sustained(load, objective_s, None, _by_rate(points))
    high = 2 * low
    while is_met(high):
        low, high = high, 2 * high
    while high > (1 + precision) * low:
        middle = float(np.sqrt(low * high))
        if is_met(middle):
            low = middle
        else:
            high = middle
    for fraction in fractions:
        is_met(fraction * low)
    return Sustained(load, objective_s, low, _by_rate(points))


MIN_REQUESTS = 4  # a run of fewer says nothing


def first_rate(load: Load) -> float:
    """A guess: the pool full of requests of mean length, each there for ten seconds."""
    requests = replace(load, duration_s=64.0).requests(1.0)
    slots = np.mean([request.num_prompt_tokens + request.max_tokens for request in requests])
    return float(load.deployment.num_slots / slots / 10)


def _by_rate(points: dict[float, Point]) -> list[Point]:
    return [points[rate] for rate in sorted(points)]


SHOWN_LATENCY_S = 1.0  # of the vertical axes, as the paper's


class CurvePoint(NamedTuple):
    """A simulated run of a search."""

    system: str
    rate: float  # requests/s
    normalised_latency_s: float | None
    batch_size: float  # mean over time
    preemptions: int


def curve_points(found: Sustained) -> list[CurvePoint]:
    """All runs of a search, by rate."""
    return [
        CurvePoint(
            found.load.system,
            point.rate,
            point.normalised_latency_s,
            point.mean_batch_size,
            point.num_preemptions,
        )
        for point in found.points
    ]


def plot_panel(axes: Axes, found: Iterable[Sustained]) -> None:
    """A line for each system, always in the same colour."""
    rates = []
    for result in found:
        system = SYSTEMS[result.load.system]
        points = [
            (point.rate, point.normalised_latency_s)
            for point in result.points
            if point.normalised_latency_s is not None
        ]
        if points:
            colour = f"C{list(SYSTEMS).index(system.name)}"
            axes.plot(
                *zip(*points, strict=True), "o-", color=colour, markersize=3, label=system.label
            )
        rates += [result.rate] if result.rate else []
    axes.set(xlim=(0, 1.3 * max(rates, default=1.0)), ylim=(0, SHOWN_LATENCY_S))
    axes.set_xlabel("request rate (requests/s)")
