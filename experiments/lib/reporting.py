"""What experiments leave behind: files of results, facts of the machine, tables."""

import csv
import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.lib import options

Row = Any  # rows are NamedTuples of a kind, or mappings with the same keys

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers")
# Tables in a log file or a pipe are not squeezed into the 80 columns assumed there.
PIPE_COLUMNS = 120

# Files


def make_out_dir(out_dir: str | Path) -> Path:
    """The folder for results, made and known to be writable before anything runs."""
    out_dir = Path(out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {out_dir}: {error.strerror}") from None
    if not os.access(out_dir, os.W_OK):
        raise ValueError(f"cannot write into the folder {out_dir}")
    return out_dir


def write_json(out_dir: str | Path, name: str, obj: object) -> Path:
    """Write `obj` to `out_dir/name`; dataclasses become objects, arrays lists and paths strings.

    ValueError for NaN and infinity, which JSON lacks: None says that there is no value.
    """
    path = Path(out_dir) / name
    path.write_text(json.dumps(obj, indent=2, default=_plain, allow_nan=False) + "\n")
    return path


def write_jsonl(out_dir: str | Path, name: str, rows: Iterable[object]) -> Path:
    """Write `rows` to `out_dir/name`, one JSON value a line; types as `write_json`."""
    path = Path(out_dir) / name
    lines = (json.dumps(row, default=_plain, allow_nan=False) + "\n" for row in rows)
    path.write_text("".join(lines))
    return path


def write_csv(out_dir: str | Path, name: str, rows: Sequence[Row]) -> Path:
    """Write `rows`, which all have the keys of the first, to `out_dir/name` under a header."""
    path = Path(out_dir) / name
    cases = list(map(as_case, rows))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, cases[0] if cases else ())
        writer.writeheader()
        writer.writerows(cases)
    return path


def as_case(row: Row) -> dict[str, Any]:
    """A row by the names of its columns."""
    return dict(row) if isinstance(row, Mapping) else dict(row._asdict())


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON for a {type(value).__name__}: {value!r}")


# Facts


def environment() -> dict[str, Any]:
    """Versions, devices, machine and commit that the figures were measured with."""
    import jax  # here, so that flags are parsed and refused before a device is opened

    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device_platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "git_commit": git_commit(Path(__file__).parent),
    }


def version(package: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with "+changes" where files differ; None without git."""
    command = ["git", "describe", "--always", "--abbrev=40", "--match=", "--dirty=+changes"]
    try:
        return subprocess.check_output(command, cwd=folder, text=True, stderr=DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def spread(values: Sequence[float], percents: Sequence[float] = (50, 99)) -> dict[str, Any]:
    """Mean and percentiles as {"mean": …, "p50": …, "p99": …}; each is None without values."""
    names = ["mean", *(f"p{percent:g}" for percent in percents)]
    if not len(values):
        return dict.fromkeys(names)
    figures = [float(np.mean(values)), *np.percentile(values, percents).tolist()]
    return dict(zip(names, figures, strict=True))


# Tables


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows to stdout, numbers to the right."""
    rows = list(rows)
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if _is_numeric(rows, index) else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    width = None if Console().is_terminal else PIPE_COLUMNS
    Console(markup=False, width=width).print(table)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same table as Markdown, which ends in a line end."""
    rows = list(rows)
    rules = ["---:" if _is_numeric(rows, index) else "---" for index in range(len(columns))]
    lines = [columns, rules, *([cell(value).replace("|", "\\|") for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(value: object) -> str:
    """A value as people read it: 1,234,567; 12.3; 0.00123; - for None."""
    if value is None:
        return "-"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float | np.floating):
        figure = float(value)
        return f"{figure:.3g}" if abs(figure) < 999.5 else f"{figure:,.0f}"
    return str(value)


def _is_numeric(rows: Sequence[Sequence[object]], index: int) -> bool:
    return all(isinstance(row[index], int | float | np.number | None) for row in rows)


# Results


def report(
    title: str,
    rows: Sequence[Row],
    configs: Any,
    *,
    columns: Sequence[str] | Mapping[str, str] = (),
    **facts: object,
) -> None:
    """Print a table of the rows, as `print_rows`, and `write_results`."""
    print_rows(title, rows, columns)
    write_results(rows, configs, **facts)


def print_rows(
    title: str, rows: Iterable[Row], columns: Sequence[str] | Mapping[str, str] = ()
) -> None:
    """Print a table of rows with the columns of the first, or with some, by name or by heading."""
    cases = [as_case(row) for row in rows]
    columns = columns or list(cases[0])
    headings = list(columns.values()) if isinstance(columns, Mapping) else columns
    print_table(title, headings, [[case[name] for name in columns] for case in cases])


def write_results(rows: Sequence[Row], configs: Any, **facts: object) -> None:
    """Write rows to results.json, as "cases", and to results.csv of the experiment's folder.

    configs: the experiment's options, or a tuple of several; results.json has them as "flags".
    facts: what else results.json says, beside the environment.
    """
    configs = configs if isinstance(configs, tuple) else (configs,)
    given = options.as_dict(*configs)
    cases = [as_case(row) for row in rows]
    results = {"flags": given, "environment": environment(), **facts, "cases": cases}
    write_json(given["out_dir"], "results.json", results)
    write_csv(given["out_dir"], "results.csv", cases)
