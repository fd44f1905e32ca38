"""Where a pool's KV slots go over a run, in the categories of the paper's Figure 2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from experiments.lib.serving_figures import batch_size, kv_usage
from paged_jax.observability.observer import IterationStats

LEGEND = {  # of each category
    "token_states": ("token states", "tab:green"),
    "reserved": ("reservation", "tab:olive"),
    "internal": ("internal", "tab:orange"),
    "external": ("external", "tab:red"),
    "free": ("free", "0.9"),
}
CATEGORIES = tuple(LEGEND)


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

    batch = float(np.average(list(map(batch_size, waited)), weights=seconds))
    kept = [stats.usage.token_states + stats.usage.reserved for stats in waited]
    shares = kv_usage(waited) or {}
    return Waste(
        **{name: 100 * shares[name] for name in CATEGORIES},
        batch_size=batch,
        tokens_to_come=float(np.average(kept, weights=seconds)) / batch,
        waited_percent=100 * sum(seconds) / sum(stats.wall_s for stats in iterations),
    )


def plot_shares(axes: Axes, groups: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Bars of shares by `CATEGORIES`, on top of each other.

    groups: by the label of a group, its bars by name, which stand beside each other.
    """
    width = 0.8 / max(map(len, groups.values()))
    ticks: dict[float, str] = {}
    for place, (label, bars) in enumerate(groups.items()):
        ticks |= {place + width * number: name for number, name in enumerate(bars)}
        axes.text(place + width * (len(bars) - 1) / 2, 102, label, ha="center")
    heights = np.array([shares for bars in groups.values() for shares in bars.values()]).T
    for category, height, top in zip(CATEGORIES, heights, heights.cumsum(axis=0), strict=True):
        label, colour = LEGEND[category]
        drawn = axes.bar(
            list(ticks), height, width * 0.92, bottom=top - height, color=colour, label=label
        )
        shown = [f"{share:.1f}" if share > 4 else "" for share in height]
        axes.bar_label(drawn, shown, label_type="center", fontsize=7)
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=7, rotation=60)
    axes.set_ylim(0, 108)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=5, fontsize=8)
