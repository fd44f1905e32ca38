"""Figures as the experiments draw them: panels of lines and bars, with what the paper found."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lib.reporting import Row, as_case

Points = Sequence[tuple[float, float | None]]


plt.switch_backend("agg")  # figures are saved and never shown


def panels(
    rows: int = 1, columns: int = 1, *, size: tuple[float, float] = (4.5, 3.2), **options: Any
) -> Any:
    """(figure, array of axes `[rows, columns]`), each panel `size` inches.

    options: further ones of `plt.subplots`, such as sharex=True.
    """
    figsize = (size[0] * columns, size[1] * rows)
    return plt.subplots(
        rows, columns, figsize=figsize, squeeze=False, layout="constrained", **options
    )


@contextmanager
def panel(
    out_dir: str | Path,
    name: str,
    xlabel: str,
    ylabel: str | None = None,
    *,
    size: tuple[float, float] = (6, 4),
    **settings: Any,
) -> Iterator[Axes]:
    """The one panel of a figure, which is saved as `out_dir/name` with a legend of what it shows.

    settings: of `Axes.set`, once the panel is drawn.
    """
    figure, [[axes]] = panels(size=size)
    yield axes
    axes.set(xlabel=xlabel, ylabel=ylabel, **settings)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    save(figure, out_dir, name)


def series(
    rows: Iterable[Row], x: str, y: str, label: Callable[[dict[str, Any]], str]
) -> dict[str, list[tuple[float, float | None]]]:
    """For `lines`: the columns `x` and `y` of the rows, grouped by the label of each row."""
    found = defaultdict(list)
    for case in map(as_case, rows):
        found[label(case)].append((case[x], case[y]))
    return dict(found)


def lines(axes: Axes, series: Mapping[str, Points], style: str = "o-", **options: Any) -> None:
    """A line for each label, through its points that have a value."""
    for label, points in series.items():
        known = [(x, y) for x, y in points if y is not None]
        if known:
            axes.plot(*zip(*known, strict=True), style, label=label, markersize=3, **options)


def bars(axes: Axes, labels: Sequence[str], groups: Mapping[str, Sequence[float | None]]) -> None:
    """Beside each other at each label, a bar of each group; such as "here" and "paper"."""
    width = 0.8 / len(groups)
    for index, (name, values) in enumerate(groups.items()):
        at = [x + (index - (len(groups) - 1) / 2) * width for x in range(len(labels))]
        axes.bar(at, [value or 0.0 for value in values], width, label=name)
    axes.set_xticks(range(len(labels)), labels)


def band(axes: Axes, low: float, high: float, label: str = "paper") -> None:
    """The range that the paper reports, across the panel."""
    axes.axhspan(low, high, color="0.85", zorder=0, label=label)


def save(figure: Figure, out_dir: str | Path, name: str) -> None:
    """Write the figure to `out_dir/name` and let go of it."""
    figure.savefig(Path(out_dir) / name, dpi=150)
    plt.close(figure)


def powers_of_two(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic x axis with a tick at each of the values."""
    places = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,g}" for place in places])
