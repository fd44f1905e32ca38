"""Simulated runs: a system of the paper's at a request rate, and the rate that it sustains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from experiments.lib import figures, grid, option, write_csv
from experiments.lib.options import SimulationOptions
from experiments.paper.requests import poisson_requests
from experiments.paper.setups import ORCA, SYSTEMS, Deployment, chosen_systems
from paged_jax.sampling_params import SamplingParams
from paged_jax.simulation.run import SimulatedRun, simulate
from paged_jax.workloads import WorkloadRequest


@dataclass(frozen=True, kw_only=True)
class SystemOptions(SimulationOptions):
    """Options of a comparison of systems."""

    systems: tuple[str, ...] = option((*ORCA, "paged"), "Systems to compare.", choices=SYSTEMS)

    def loads_of(
        self, deployment: Deployment, lengths: str, duration_s: float, **options: Any
    ) -> "list[Load]":
        """The same requests for each system that is compared."""
        return [
            Load(system.name, deployment, lengths, duration_s, seed=self.seed, **options)
            for system in chosen_systems(self.systems)
        ]


@dataclass(frozen=True, kw_only=True)
class SearchOptions(SystemOptions):
    """Options of a comparison of the rates that systems sustain."""

    objective_s: float = option(
        0.1, "A rate is sustained up to this mean latency per output token (s).", least=1e-3
    )


def parse_rate(flag: str, form: str, text: str) -> tuple[str, float]:
    """(name, requests/s) of one of the texts that a flag takes in the form `name:rate`."""
    name, _, rate = text.partition(":")
    try:
        return name, float(rate)
    except ValueError:
        raise ValueError(f"--{flag} takes {form}, got {text!r}") from None


# One run


@dataclass(frozen=True)
class Load:
    """A system and the requests that it serves: plain data, which can travel between processes."""

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

    def simulate(self, rate: float, *, cut: bool = False) -> SimulatedRun:
        """Serve what arrives until `duration_s`, to its end, or `cut` there.

        Only a run to the end has a mean latency that does not leave out the requests that wait
        longest; only one that is cut has averages of the time at that rate alone.
        """
        system, caches = SYSTEMS[self.system], self.enable_prefix_caching
        return simulate(
            self.requests(rate),
            system.config(self.deployment, self.block_size, enable_prefix_caching=caches),
            system.cost(self.deployment),
            params=self.params,
            horizon_s=self.duration_s if cut else None,
            seed=self.seed,
        )


OVERLOAD = 20  # times as many requests as a first guess says are served


def overloaded(load: Load) -> SimulatedRun:
    """A full pool: many more requests come than can be served."""
    return load.simulate(OVERLOAD * first_rate(load), cut=True)


def first_rate(load: Load) -> float:
    """A guess: the pool full of requests of mean length, each there for ten seconds."""
    requests = replace(load, duration_s=64.0).requests(1.0)
    slots = np.mean([request.num_prompt_tokens + request.max_tokens for request in requests])
    return float(load.deployment.num_slots / slots / 10)


# A search

Panel = tuple[Any, ...]  # what the systems of a panel have in common


@dataclass(frozen=True)
class Point:
    """A load at one rate, served to its end. Averages are over time."""

    rate: float  # requests/s
    normalised_latency_s: float | None  # mean over requests; None: none has finished
    mean_batch_size: float
    token_states: float  # fraction of the pool
    num_preemptions: int


def serve_at(load: Load, rate: float) -> Point:
    run = load.simulate(rate)
    return Point(
        rate,
        run.normalised_latency_s,
        run.mean_batch_size,
        run.memory_shares["token_states"],
        run.num_preemptions,
    )


@dataclass(frozen=True)
class Sustained:
    """The highest rate at which a load's mean normalised latency stays within an objective."""

    load: Load
    rate: float | None  # requests/s; None: it does not, however slowly requests come
    points: list[Point]  # all runs of the search, by rate
    gain: float | None = None  # paging's rate over it; None where one has no rate

    @property
    def point(self) -> Point | None:
        """The run at the rate found."""
        return next((point for point in self.points if point.rate == self.rate), None)


MIN_REQUESTS = 4  # a run of fewer says nothing


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

    low = first_rate(load)
    while (is_enough := low * load.duration_s >= MIN_REQUESTS) and not is_met(low):
        low /= 2
    if is_enough:
        high = 2 * low
        while is_met(high):
            low, high = high, 2 * high
        while high > (1 + precision) * low:
            middle = float(np.sqrt(low * high))
            low, high = (middle, high) if is_met(middle) else (low, middle)
        for fraction in fractions:
            is_met(fraction * low)
    return Sustained(load, low if is_enough else None, [points[rate] for rate in sorted(points)])


def find_panels(
    panels: Mapping[Panel, Sequence[Load]],
    config: SearchOptions,
    *,
    precision: float = 0.02,
    fractions: Sequence[float] = (),
) -> dict[Panel, list[Sustained]]:
    """`find_sustained` of the systems that each panel of a figure compares."""
    find = partial(
        find_sustained, objective_s=config.objective_s, precision=precision, fractions=fractions
    )
    loads = [load for compared in panels.values() for load in compared]
    # Short requests are many, and paging serves the most.
    loads.sort(key=lambda load: (load.lengths != "alpaca", load.system != "paged"))
    searches = grid(find, loads, config, unit="system", processes=config.processes)
    found = dict(zip(loads, searches, strict=True))
    for compared in panels.values():
        paged = next((found[load].rate for load in compared if load.system == "paged"), None)
        for load in compared:
            if paged and (rate := found[load].rate):
                found[load] = replace(found[load], gain=paged / rate)
    return {panel: [found[load] for load in compared] for panel, compared in panels.items()}


# Curves of latency against rate

SHOWN_LATENCY_S = 1.0  # of the vertical axes, as the paper's


def save_curves(
    panels: Mapping[Panel, Sequence[Sustained]],
    out_dir: str,
    figure_name: str,
    *,
    names: Sequence[str],
    columns: int,
) -> None:
    """All runs of all searches, by rate: curves.csv, and a figure in rows of so many `columns`.

    names: of the values of a panel's key.
    """
    rows = [
        {
            **dict(zip(names, panel, strict=True)),
            "system": found.load.system,
            "rate": point.rate,  # requests/s
            "normalised_latency_s": point.normalised_latency_s,
            "batch_size": point.mean_batch_size,  # over time
            "preemptions": point.num_preemptions,
        }
        for panel, compared in panels.items()
        for found in compared
        for point in found.points
    ]
    write_csv(out_dir, "curves.csv", rows)
    figure, axes = figures.panels(-(-len(panels) // columns), columns)
    for each, (panel, compared) in zip(axes.flat, panels.items(), strict=True):
        for found in compared:
            system = SYSTEMS[found.load.system]
            points = [(point.rate, point.normalised_latency_s) for point in found.points]
            colour = f"C{list(SYSTEMS).index(system.name)}"  # always that of the system
            figures.lines(each, {system.label: points}, color=colour)
        highest = max((found.rate or 0.0 for found in compared), default=0.0)
        each.set(xlim=(0, 1.3 * (highest or 1.0)), ylim=(0, SHOWN_LATENCY_S))
        each.set_xlabel("request rate (requests/s)")
        each.set_title(", ".join(map(str, panel)), fontsize=10)
    for each in axes[:, 0]:
        each.set_ylabel("normalised latency (s/token)")
    axes[0, 0].legend(fontsize=8)
    figures.save(figure, out_dir, figure_name)
