"""Where a pool's KV slots go over a run, in the categories of the paper's Figure 2."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from experiments.lib.serving_figures import batch_size
from paged_jax.observability.observer import IterationStats

CATEGORIES = ("token_states", "reserved", "internal", "external", "free")
COLOURS = ("tab:green", "tab:olive", "tab:orange", "tab:red", "0.9")


@dataclass(frozen=True)
class Waste:
    """Averages over the time in which requests waited, shares in percent of the pool.

    Only then does memory limit how many sequences run, and free slots are of no use. Figure 2 has
    no category of free slots: contiguous systems have none then, all are in holes too small.
    """

    token_states: float
    reserved: float
    internal: float
    external: float
    free: float
    batch_size: float
    tokens_to_come: float  # that a running sequence has and will have
    waited_percent: float  # of the time of the iterations

    @property
    def shares(self) -> dict[str, float]:
        """By `CATEGORIES`."""
        return {name: getattr(self, name) for name in CATEGORIES}

    @property
    def used_as_tokens(self) -> float:
        """Token states in percent of the slots that are not free."""
        return 100 * self.token_states / (100 - self.free)


def waste_of(iterations: Sequence[IterationStats]) -> Waste:
    """ValueError if no request ever waited."""
    waited = [stats for stats in iterations if stats.num_waiting]
    seconds = [stats.wall_s for stats in waited]
    if not sum(seconds):
        raise ValueError(
            "no request ever waited for memory, so nothing is known of its waste under load; "
            "raise the rate or the number of requests"
        )

    def mean(values: Iterable[float]) -> float:
        return float(np.average(list(values), weights=seconds))

    batch = mean(map(batch_size, waited))
    kept = mean(stats.usage.token_states + stats.usage.reserved for stats in waited)
    shares = {
        name: 100 * mean(stats.usage.shares()[name] for stats in waited) for name in CATEGORIES
    }
    return Waste(
        **shares,
        batch_size=batch,
        tokens_to_come=kept / batch,
        waited_percent=100 * sum(seconds) / sum(stats.wall_s for stats in iterations),
    )


def plot_shares(axes: Axes, groups: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Bars of shares by `CATEGORIES`, on top of each other.

    groups: by the label of a group, its bars by name, which stand beside each other.
    """
    width = 0.8 / max(len(bars) for bars in groups.values())
    ticks: dict[float, str] = {}
    for place, (label, bars) in enumerate(groups.items()):
        for number, (name, shares) in enumerate(bars.items()):
            x, bottom = place + width * number, 0.0
            ticks[x] = name
            for share, colour in zip(shares, COLOURS, strict=True):
                axes.bar(x, share, width * 0.92, bottom=bottom, color=colour)
                if share > 4:
                    middle = bottom + share / 2
                    axes.text(x, middle, f"{share:.1f}", ha="center", va="center", fontsize=7)
                bottom += share
        axes.text(place + width * (len(bars) - 1) / 2, 102, label, ha="center")
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7, rotation=60)
    axes.set_ylim(0, 108)
    axes.legend(
        [Patch(color=colour) for colour in COLOURS],
        ["token states", "reservation", "internal", "external", "free"],
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        ncols=5,
        fontsize=8,
    )
