"""Every kernel on the GPU of this machine, in minutes: right or wrong, and how fast.

    scripts/gpu_check.sh --out_dir=out/gpu_check
    scripts/gpu_check.sh --impl=mosaic_gpu,contiguous --time_limit_s=120
    scripts/gpu_check.sh --dry_run           without a GPU: the same on tiny shapes, interpreted

For a machine that is there for a few minutes, with a JAX of its own and nothing installed. What
matters most comes first (`gpu_plan`), NVIDIA's compute-sanitizer last, where there is one. Every
check writes results.json and table.md anew, so that they are whole whenever it is stopped. One
process at a time has the GPU: a kernel that hangs, fails or takes it down costs its own check
alone, and after three its implementation is left out.

Exit code 1: something was wrong, failed, hung or crashed. Checks that had no time are no fault.
"""

import operator
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from experiments.kernels import gpu_plan
from experiments.kernels.gpu_plan import BASELINE, OURS, Check, Settings, ValueRow, is_fault
from experiments.kernels.measure import Row, empty_row, facts_from, tables, with_ratios
from experiments.kernels.shapes import Shape
from experiments.lib import Options, option, print_rows, run
from experiments.lib.reporting import markdown_table, write_json
from pallas_kernels import extras
from pallas_kernels.lab.checks import check_random_values, lab_of
from pallas_kernels.lab.worker import Worker


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    time_limit_s: float = option(340.0, "The checks end after so long (s).", quick=120.0, least=1)
    check_limit_s: float = option(40.0, "One check may take so long (s).", least=1)
    seconds: float = option(0.1, "A kernel is timed for about so long (s).", least=0)
    impl: tuple[str, ...] = option(None, "Only these kernels and baselines run. By default all do.")
    dry_run: bool = option(False, "Tiny shapes and interpreted kernels run on a CPU.")
    seed: int = option(secrets.randbits(32), "Seed of the inputs. By default a new one.", least=0)


LEAST_S = 5.0  # a check is not begun with less than this left
MAX_LOSSES = 3  # processes that an implementation may cost
SANITIZER_S = 60.0  # kept for the sanitizer, where there is one
# A killed process may give its memory back a moment after its end.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


# The files: results.json and table.md, and faults.log with tracebacks and last words of processes


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
            f"### {title}\n\n{markdown_table(list(rows[0]), [list(row.values()) for row in rows])}"
            for title, rows in self.tables().items()
        )
        return "\n".join((f"{self.summary()}\n", *parts))

    def print(self) -> None:
        """Print the tables; the most important comes last, where a cut log still has it."""
        for title, rows in reversed(self.tables().items()):
            print_rows(title, rows)
        print(self.summary())

    def summary(self) -> str:
        facts = self.facts
        return (
            f"{facts.get('device_kind')}, JAX {facts.get('jax')}, copy bandwidth "
            f"{facts.get('copy_gb_per_s', 0):,.0f} GB/s, times by {facts.get('timing')}. "
            f"{self.state}; {len(self.faults())} faults; {len(self.not_run)} checks not run."
        )

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """The tables that have rows, by their titles."""
        faults = [{"check": what, "verdict": why} for what, why in self.faults()]
        found = {
            "Goals": [goal._asdict() for goal in goals(self.latency)],
            **tables(with_ratios(self.latency, BASELINE)),
            "Values against float64": list(self._values_by_implementation()),
            "compute-sanitizer": self.sanitizer,
            "Faults": faults,
        }
        return {title: rows for title, rows in found.items() if rows}

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


# NVIDIA's compute-sanitizer over one value check, where it is installed

COMMAND = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck")
# JAX asks the driver for things that the driver may refuse, which is no error of a kernel.
OPTIONS = ("--report-api-errors", "no", "--target-processes", "all", "--print-limit", "5")
# Each array has an allocation of its own, so that an access past its end is noticed.
SANITIZED = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
WATCHED = "from experiments.kernels.gpu_check import watched; watched({!r}, {!r})"
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (.*)")


def find_sanitizer() -> str | None:
    """The command, on the path or with a CUDA toolkit."""
    return shutil.which(COMMAND) or shutil.which(COMMAND, path="/usr/local/cuda/bin")


def sanitize(command: str, tool: str, impl: str, case: str, timeout_s: float) -> dict[str, Any]:
    """A row of the report; the sanitizer's summary is the verdict."""
    row = {"tool": tool, "implementation": impl, "case": case}
    try:
        done = subprocess.run(
            [command, "--tool", tool, *OPTIONS, sys.executable, "-c", WATCHED.format(impl, case)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **SANITIZED, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return row | {"verdict": f"skipped: it took more than {timeout_s:.0f} s"}
    return row | {"verdict": sanitizer_verdict(done.stdout + done.stderr)}


def sanitizer_verdict(output: str) -> str:
    """The verdict by the sanitizer's output: pass where the check passed and nothing was found."""
    summary = SUMMARY.search(output)
    if summary is None:
        last = (output.strip().splitlines() or ["no output"])[-1]
        return f"skipped: it does not work here: {last}"
    if re.match(r"0 (errors|hazards)", summary[2]) is None:
        return f"wrong: {summary[2]}"
    if "check: pass" not in output:
        return "failed: the check did not pass under it"
    return "pass"


def watched(impl: str, case: str) -> None:
    """The check that the sanitizer watches."""
    (spec,) = (spec for spec in lab_of("attention").VALUE_SPECS if spec.name == case)
    print(f"check: {check_random_values(impl, spec, 0, False).verdict}")


# A run


def start(worker: Worker, report: Report, config: Config) -> Settings:
    """Open the device in the worker's process; ValueError for a device that is not meant."""
    facts = facts_from(worker)
    report.facts = {**facts, "seed": config.seed, "argv": sys.argv[1:]}
    platform = facts["device_platform"]
    if (platform == "gpu") == config.dry_run:
        wrong = f"JAX's device is a {platform}; --dry_run is for a CPU, and only for it"
        missing = None if platform == "gpu" else extras.missing_for_gpu()
        raise ValueError("; ".join(filter(None, (wrong, missing))))
    measured = (facts["device_kind"], facts["copy_gb_per_s"])
    return Settings(*measured, config.seconds, config.dry_run, config.seed)


def run_checks(
    checks: Sequence[Check],
    worker: Worker,
    report: Report,
    settings: Settings,
    *,
    deadline: float,
    limit_s: float,
) -> None:
    """Run the checks in their order until the deadline; one check may take `limit_s`."""
    losses: Counter[str] = Counter()
    for number, check in enumerate(checks):
        left = deadline - time.monotonic()
        if left < LEAST_S:
            report.not_run += map(str, checks[number:])
            return
        name = check.implementation
        if losses[name] == MAX_LOSSES:
            report.not_run.append(f"{check} ({name} cost {MAX_LOSSES} processes before)")
            continue
        outcome = worker.call(*check.call(settings), min(left, limit_s))
        row = check.row(outcome, settings)
        if gpu_plan.spoils_process(row.verdict):
            losses[name] += 1
            worker.close()
        report.add(row, outcome.details or getattr(outcome.value, "details", ""))
        print(f"{deadline - time.monotonic():4.0f} s left. {check}: {row.verdict}", flush=True)


def run_sanitizer(command: str, report: Report, deadline: float) -> None:
    """Run each of the sanitizer's tools over each of our kernels, while there is time."""
    for tool, implementation in product(TOOLS, gpu_plan.OURS):
        left = deadline - time.monotonic()
        if left < LEAST_S:
            report.not_run.append(f"compute-sanitizer {tool}: {implementation}")
            continue
        row = sanitize(command, tool, implementation, gpu_plan.FIRST_SPECS[0].name, left)
        report.sanitizer.append(row)
        report.write()
        print(f"compute-sanitizer {tool}, {implementation}: {row['verdict']}", flush=True)


def main(config: Config) -> int:
    deadline = time.monotonic() + config.time_limit_s
    report = Report(Path(config.out_dir))
    # Whoever limits the time stops the worker, too; the files are whole already.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    plan = gpu_plan.small_plan() if config.dry_run else gpu_plan.full_plan()
    checks = gpu_plan.chosen(plan, config.impl)
    command = None if config.dry_run else find_sanitizer()
    try:
        with Worker(ENVIRONMENT) as worker:
            settings = start(worker, report, config)
            print(report.summary(), flush=True)
            end = deadline - (SANITIZER_S if command else 0)
            limit_s = config.check_limit_s
            run_checks(checks, worker, report, settings, deadline=end, limit_s=limit_s)
        if command:
            run_sanitizer(command, report, deadline)
        report.state = "finished"
    finally:
        report.write()
    report.print()
    return 1 if report.faults() else 0


if __name__ == "__main__":
    run(main, Config)
