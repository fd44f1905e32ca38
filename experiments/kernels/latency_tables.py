"""Latency rows as people read them: a table for each geometry, dtype and number of queries."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.kernels.measure import Row

# Figure 18a: the paper's kernel over FasterTransformer's contiguous one (batch 8 and 32, context
# 64 to 256).
PAPER_RATIO = (1.20, 1.26)

Lines = dict[str, list[tuple[float, float]]]  # label -> points


def plot(rows: Sequence[Row], baseline: str, path: Path) -> None:
    """Two panels over the rows that were timed."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.5), layout="constrained")
    plot_ratios(axes[0], rows, baseline)
    plot_block_sizes(axes[1], rows)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_ratios(axes: Axes, rows: Sequence[Row], baseline: str) -> None:
    """A line per implementation, geometry, batch and block size; below 1 is faster."""
    axes.axhspan(*PAPER_RATIO, color="tab:red", alpha=0.2, label="paper, figure 18a")
    axes.axhline(1, color="grey", linewidth=0.8)
    lines: Lines = {}
    for row in rows:
        if row.ratio is not None and row.implementation != baseline:
            block = f", block {row.block_size}" if row.block_size else ""
            label = f"{row.implementation}, {row.geometry}, batch {row.batch}{block}"
            lines.setdefault(label, []).append((row.context, row.ratio))
    _draw(axes, lines)
    axes.set(xlabel="context length (tokens)", ylabel=f"time / {baseline}", ylim=(0, None))


def plot_block_sizes(axes: Axes, rows: Sequence[Row]) -> None:
    """Time against block size, a line per implementation, geometry, batch and context."""
    lines: Lines = {}
    for row in rows:
        if row.block_size is not None and row.time_us is not None:
            place = f"{row.geometry}, batch {row.batch}, context {row.context}"
            points = lines.setdefault(f"{row.implementation}, {place}", [])
            points.append((row.block_size, row.time_us))
    _draw(axes, lines)
    axes.set(xlabel="block size (tokens)", ylabel="time (µs)", yscale="log")


def _draw(axes: Axes, lines: Lines) -> None:
    """Lines over powers of two, with the points' own numbers; their names stand below."""
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=label)
    axes.set_xscale("log", base=2)
    places = sorted({place for points in lines.values() for place, _ in points})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=6, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.15))


COLUMNS = {  # title -> field of a row
    "implementation": "implementation",
    "batch": "batch",
    "context": "context",
    "block": "block_size",
    "error": "error",
    "µs": "time_us",
    "by": "method",
    "GB/s": "gb_per_s",
    "of copy": "copy_fraction",
    "ratio": "ratio",
    "verdict": "verdict",
}


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[str], list[list[Any]]]]:
    """(title, columns, cells) of each."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        work = "decode" if row.queries == 1 else f"prefill of {row.queries}"
        title = f"{row.geometry}, {row.dtype}, {work}, {row.device}"
        groups.setdefault(title, []).append(row)
    for title, group in groups.items():
        cells = [[getattr(row, field) for field in COLUMNS.values()] for row in map(_named, group)]
        yield title, list(COLUMNS), cells


def _named(row: Row) -> Row:
    """With the settings of the variant beside the implementation's name."""
    named = f"{row.implementation} ({row.settings})" if row.settings else row.implementation
    return row._replace(implementation=named)
