"""Traces that are CSV files: a header, then a request a line."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from paged_jax.workloads.files import line_error, read_lines


def read_columns(path: str | Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Each row's line number and its fields of the named columns; blank lines are passed over.

    Columns may come in any order and with others. ValueError names the line that is no row.
    """
    lines = read_lines(path)
    _, header = next(lines, (1, ""))
    names = [name.strip() for name in header.split(",")]
    if missing := [name for name in columns if name not in names]:
        raise line_error(path, 1, f"no column {', '.join(missing)} in the header {header!r}")
    places = [names.index(name) for name in columns]
    for number, line in lines:
        if not line.strip():
            continue
        try:
            fields = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise line_error(path, number, str(error)) from None
        if len(fields) != len(names):
            message = f"{len(names)} fields expected, got {len(fields)} in {line!r}"
            raise line_error(path, number, message)
        yield number, [fields[place] for place in places]
