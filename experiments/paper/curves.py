"""Normalised latency against request rate: rows and panels of the paper's figures 12 and 14."""

from collections.abc import Iterable
from typing import NamedTuple

from matplotlib.axes import Axes

from experiments.paper.simulations import Sustained
from experiments.paper.systems import SYSTEMS

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
