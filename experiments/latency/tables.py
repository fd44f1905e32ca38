"""Latency rows as people read them: a table for each geometry, dtype and number of queries."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.latency.measure import Row

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
