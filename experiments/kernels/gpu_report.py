"""The files of a run on a GPU: results.json and table.md, written anew after every check.

Tracebacks, and the last words of processes that crashed, are appended to faults.log.
"""

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from experiments.kernels import gpu_plan
from experiments.kernels.gpu_plan import BASELINE, OURS, ValueRow, is_fault
from experiments.kernels.measure import Row, empty_row, tables, with_ratios
from experiments.kernels.shapes import Shape
from experiments.lib.reporting import markdown_table, print_table, write_json


class Goal(NamedTuple):
    """A figure of a kernel against its target. None: a row that it needs is missing."""

    kernel: str
    what: str
    target: str
    measured: float | None
    met: bool | None


def goal(kernel: str, what: str, sign: str, bound: float, measured: float | None) -> Goal:
    """The goal that a figure is at least (>=) or at most (<=) a bound."""
    meets = operator.ge if sign == ">=" else operator.le
    met = None if measured is None else meets(measured, bound)
    return Goal(kernel, what, f"{sign} {bound:g}", measured, met)


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """The goals of each of our kernels."""

    def find(name: str, shape: Shape) -> Row:
        """The kernel's row at a shape, or an empty one."""
        missing = empty_row(name, shape, "", "not run")
        return next((row for row in rows if row.same_case == missing.same_case), missing)

    def over(name: str, other: str) -> float | None:
        """Time of one over that of the other, if both were taken in the same way."""
        mine, theirs = find(name, gpu_plan.FULL_BATCH), find(other, gpu_plan.FULL_BATCH)
        if mine.time_us and theirs.time_us and mine.method == theirs.method:
            return mine.time_us / theirs.time_us
        return None

    for name in OURS:
        for shape, least in ((gpu_plan.FULL_BATCH, 0.85), (gpu_plan.LONG_CONTEXT, 0.6)):
            what = f"of copy bandwidth, batch {shape.batch}, context {shape.context}"
            yield goal(name, what, ">=", least, find(name, shape).copy_fraction)
        yield goal(name, f"time / {BASELINE}", "<=", 1.05, over(name, BASELINE))
        yield goal(name, "time of jax_paged / time", ">=", 1.3, over("jax_paged", name))
        yield goal(name, "time / cudnn_paged", "<=", 1.05, over(name, "cudnn_paged"))


Table = tuple[str, list[str], list[list[Any]]]  # title, columns, rows


@dataclass
class Report:
    """All that is known so far."""

    out_dir: Path
    facts: dict[str, Any] = field(default_factory=dict)
    values: list[ValueRow] = field(default_factory=list)
    latency: list[Row] = field(default_factory=list)
    sanitizer: list[dict[str, Any]] = field(default_factory=list)
    state: str = "not finished"
    not_run: list[str] = field(default_factory=list)

    def add(self, row: Row | ValueRow, details: str) -> None:
        """Add a row; `details` of a fault are more than a line."""
        rows: list[Any] = self.latency if isinstance(row, Row) else self.values
        rows.append(row)
        self.write()
        if details:
            with (self.out_dir / "faults.log").open("a") as log:
                log.write(f"{row}\n{details}\n\n")

    def write(self) -> None:
        """Replace both files, which are whole at any moment."""
        results = {
            "state": self.state,
            **self.facts,
            "goals": [goal._asdict() for goal in goals(self.latency)],
            "values": [row._asdict() for row in self.values],
            "latency": [row._asdict() for row in with_ratios(self.latency, BASELINE)],
            "sanitizer": self.sanitizer,
            "not_run": self.not_run,
        }
        write_json(self.out_dir, "results.json.new", results)
        (self.out_dir / "table.md.new").write_text(self.markdown())
        for name in ("results.json", "table.md"):
            os.replace(self.out_dir / f"{name}.new", self.out_dir / name)

    def markdown(self) -> str:
        parts = (
            f"### {title}\n\n{markdown_table(columns, rows)}"
            for title, columns, rows in self.tables()
        )
        return "\n".join((f"{self.summary()}\n", *parts))

    def print(self) -> None:
        """Print the tables; the most important comes last, where a cut log still has it."""
        for table in reversed(list(self.tables())):
            print_table(*table)
        print(self.summary())

    def summary(self) -> str:
        facts = self.facts
        return (
            f"{facts.get('device_kind')}, JAX {facts.get('jax')}, copy bandwidth "
            f"{facts.get('copy_gb_per_s', 0):,.0f} GB/s, times by {facts.get('timing')}. "
            f"{self.state}; {len(self.faults())} faults; {len(self.not_run)} checks not run."
        )

    def tables(self) -> Iterator[Table]:
        yield _table("Goals", [goal._asdict() for goal in goals(self.latency)])
        yield from tables(with_ratios(self.latency, BASELINE))
        if self.values:
            yield _table("Values against float64", list(self._values_by_implementation()))
        if self.sanitizer:
            yield _table("compute-sanitizer", self.sanitizer)
        if faults := self.faults():
            yield _table("Faults", [{"check": what, "verdict": why} for what, why in faults])

    def faults(self) -> list[tuple[str, str]]:
        """(check, verdict) of all that is wrong, failed, hung or crashed."""
        found = [(f"{row.op} {row.implementation}, {row.case}", row.verdict) for row in self.values]
        what = "{implementation}, {geometry}, batch {batch}, context {context}, block {block_size}"
        found += [(what.format_map(row._asdict()), row.verdict) for row in self.latency]
        found += [(row["tool"], row["verdict"]) for row in self.sanitizer]
        return [(check, verdict) for check, verdict in found if is_fault(verdict)]

    def _values_by_implementation(self) -> Iterator[dict[str, Any]]:
        for op, implementation in dict.fromkeys(row[:2] for row in self.values):
            rows = [row for row in self.values if row[:2] == (op, implementation)]
            verdicts = [row.verdict.split(":")[0] for row in rows]
            shares = [row.error / row.tolerance for row in rows if row.error and row.tolerance]
            yield {
                "op": op,
                "implementation": implementation,
                "passed": verdicts.count("pass"),
                "refused": verdicts.count("refused"),
                "faults": sum(map(is_fault, verdicts)),
                "largest error / bound": max(shares, default=None),
            }


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of rows with the keys of the first."""
    return title, list(rows[0]), [list(row.values()) for row in rows]
