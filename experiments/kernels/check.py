"""Whether a kernel is right, free of races, and compiles well for each GPU; a GPU is not needed.

    python -m experiments.kernels.check --impl=mosaic_gpu
    python -m experiments.kernels.check --impl=my_folder.my_kernel --case=window --target=H200
    python -m experiments.kernels.check --op=kv_write --impl=xla

An implementation is a name in the op's registry or a module that holds one. Each case runs in a
process that is killed when it takes too long, so that a kernel that waits forever is one bad row.

values    Fresh random inputs against float64, to the rounding that the dtypes allow; NaN stands in
          all that must not be read. The seed is printed; --seed repeats a run. Without a GPU,
          kernels run in Pallas' interpreter, which also reports races and accesses out of bounds.
lowering  Each target's lowering of shapes of real models. With the `aot` extra, also the machine
          code: registers, spills, shared memory, how many programs fit on a core, instructions.

A kernel may refuse a case with a reason; that is no failure, unless it refuses all of a kind. Exit
code 1: something failed. Expect less than a minute on two CPU cores. Results have a row for each
case.
"""

import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from tqdm import tqdm

from experiments.lib import Options, option, print_rows, run, write_results
from pallas_kernels import targets
from pallas_kernels.lab import aot, ptx, worker
from pallas_kernels.lab.checks import OPS, CheckResult, lab_of
from pallas_kernels.targets import TARGETS

CHECKS = {
    "values": "pallas_kernels.lab.checks:check_random_values",
    "lowering": "pallas_kernels.lab.checks:check_lowering",
}
FAULTS_SHOWN, DETAIL_LINES = 10, 20
GOOD = ("pass", "refused")
RACES = {None: None, False: "none", True: "found"}
SHORT_NAMES = {"cp.async.bulk.tensor": "TMA", "fence.proxy.async": "fence.proxy"}

Row = dict[str, Any]  # of results.json


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    impl: tuple[str, ...] = option(None, "Registered names or modules of the implementations.")
    op: str = option("attention", "The implementations implement this op.", choices=OPS)
    checks: tuple[str, ...] = option((*CHECKS,), "These run.", quick=("values",), choices=CHECKS)
    case: str = option("", "Only cases with this text in their name run.")
    target: tuple[str, ...] = option((*TARGETS,), "Compile for these GPUs.", choices=TARGETS)
    interpret: bool | None = option(None, "Interpret kernels. By default where there is no GPU.")
    timeout_s: float = option(60.0, "A case may take so long (s).", least=0.1)
    workers: int = option(min(os.cpu_count() or 1, 8), "So many processes run at once.", least=1)
    seed: int = option(secrets.randbits(32), "Seed of the inputs. By default a new one.", least=0)
    out_dir: str = option("out/kernel_check", "Folder for the results.")


class Task(NamedTuple):
    """One check of one case, and the device that it runs on or the GPU that it is for."""

    kind: str  # of `CHECKS`
    impl: str
    spec: Any
    where: str
    arguments: tuple[Any, ...]


def tasks(config: Config, device: str, interpret: bool) -> list[Task]:
    """All that the options ask for; ValueError if that is nothing."""
    lab, compile = lab_of(config.op), aot.is_available()
    seeds = np.random.SeedSequence(config.seed).generate_state(len(lab.VALUE_SPECS)).tolist()
    seeded = zip(lab.VALUE_SPECS, seeds, strict=True)
    compiled = product(lab.COMPILE_SPECS, config.target)
    cases = [("values", spec, device, (seed, interpret)) for spec, seed in seeded]
    cases += [("lowering", spec, target, (target, compile)) for spec, target in compiled]
    found = [
        Task(kind, impl, spec, where, (impl, spec, *options, config.op))
        for impl, (kind, spec, where, options) in product(config.impl, cases)
        if kind in config.checks
    ]
    chosen = [task for task in found if config.case in task.spec.name]
    if not chosen:
        names = dict.fromkeys(task.spec.name for task in found)
        raise ValueError(f"no case has {config.case!r} in its name; there are {', '.join(names)}")
    return chosen


def run_tasks(todo: list[Task], config: Config, interpret: bool) -> list[worker.Outcome]:
    """The outcomes of the tasks, in their order."""
    outcomes: dict[Task, worker.Outcome] = {}
    on_cpu = {"JAX_PLATFORMS": "cpu"}
    with tqdm(total=len(todo), unit="case") as bar:
        # One process at a time has the GPU.
        for on_device, num_workers, env in ((True, 1, None), (False, config.workers, on_cpu)):
            own = [t for t in todo if (t.kind == "values" and not interpret) == on_device]
            calls = [(CHECKS[task.kind], task.arguments) for task in own]
            ended = worker.run_all(calls, config.timeout_s, num_workers=num_workers, env=env)
            for index, outcome in ended:
                task = own[index]
                outcomes[task] = outcome
                bar.set_postfix_str(f"{task.impl} {task.spec.name} {task.where}")
                bar.update()
    return [outcomes[task] for task in todo]


def result_of(outcome: worker.Outcome) -> CheckResult:
    """A check's result, or the verdict on a call that did not return one."""
    if outcome.status == "returned":
        return cast(CheckResult, outcome.value)
    verdict = "failed" if outcome.status == "raised" else outcome.status
    return CheckResult(verdict, outcome.reason, outcome.details)


def row_of(task: Task, outcome: worker.Outcome) -> Row:
    """One row of results.json; None where a check has no such figure."""
    figures = asdict(result_of(outcome))
    del figures["details"]
    instructions = figures.pop("instructions") or {}
    return {
        "check": task.kind,
        "implementation": task.impl,
        "case": task.spec.name,
        "shape": task.spec.shape,
        "dtype": task.spec.dtype,
        "where": task.where,
        **figures,
        **{name: instructions.get(name) for name in ptx.INSTRUCTIONS},
        "seconds": outcome.seconds,
    }


def print_tables(rows: Sequence[Row]) -> None:
    """For each implementation a table of each kind of check."""
    tables = defaultdict[str, list[Row]](list)
    for row in rows:
        where = f" on {row['where']}" if row["check"] == "values" else ""
        tables[f"{row['implementation']}: {row['check']}{where}"].append(line_of(row))
    for title, lines in tables.items():
        print_rows(title, lines)
    if (reason := aot.missing()) and any(row["check"] == "lowering" for row in rows):
        print(f"no machine code was looked at: {reason}")


def line_of(row: Row) -> Row:
    """The columns of a table. Only refusals have their reason here: faults stand below."""
    verdict = f"refused: {row['reason']}" if row["verdict"] == "refused" else row["verdict"]
    if row["check"] == "values":
        shown = {name: row[name] for name in ("case", "shape", "dtype", "error", "tolerance")}
        return shown | {"races": RACES[row["races"]], "s": row["seconds"], "verdict": verdict}
    counts = [(row[name], SHORT_NAMES.get(name, name)) for name in ptx.INSTRUCTIONS]
    instructions = ", ".join(f"{count} {name}" for count, name in counts if count) or None
    programs = None  # on a core at once, what limits them, and the part of its threads in use
    if row["occupancy"] is not None:
        programs = f"{row['programs_per_core']} ({row['limited_by']}), {row['occupancy']:.0%}"
    shown = {"case": row["case"], "GPU": row["where"]}
    shown |= {
        name.replace("_", " "): row[name] for name in ("registers", "spills", "shared_memory")
    }
    return shown | {
        "programs per core": programs,
        "instructions": "no Pallas kernel" if row["kernels"] == 0 else instructions,
        "verdict": verdict,
    }


def faults(rows: Sequence[Row], details: Sequence[str]) -> list[dict[str, str]]:
    """The faults that make the run fail, each in a line; `details` has the details of each row."""
    found = [
        ("{implementation}, {case}, {where}: {verdict}: {reason}".format_map(row), detail)
        for row, detail in zip(rows, details, strict=True)
        if row["verdict"] not in GOOD
    ]
    for impl in dict.fromkeys(row["implementation"] for row in rows):
        own = [row for row in rows if row["implementation"] == impl]
        # A GPU may lack what a kernel needs, so all lowering may be refused, but not all values.
        values = [row for row in own if row["check"] == "values"]
        if {row["verdict"] for row in values or own} == {"refused"}:
            found.append((f"{impl}: every case is refused, so nothing was checked", ""))
    return [{"fault": fault, "details": detail} for fault, detail in found]


def print_faults(found: Sequence[dict[str, str]]) -> None:
    """A line for each of the first faults, and the end of the first details."""
    for fault in found[:FAULTS_SHOWN]:
        print(fault["fault"])
    if len(found) > FAULTS_SHOWN:
        print(f"… and {len(found) - FAULTS_SHOWN} more")
    if detail := next((fault["details"] for fault in found if fault["details"]), None):
        print("\n".join(detail.splitlines()[-DETAIL_LINES:]))
        print("(the end of the first fault's details; all are in results.json)")


def main(config: Config) -> int:
    if not config.impl:
        raise ValueError("--impl: the name or the module of an implementation is needed")
    for impl in config.impl:
        try:
            lab_of(config.op).REGISTRY.module(impl)
        except ImportError as error:
            raise ValueError(f"cannot import the implementation {impl}: {error}") from error
    # The workers need the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    interpret = targets.current() is None if config.interpret is None else config.interpret
    device = "CPU" if interpret else jax.devices()[0].device_kind

    todo = tasks(config, device, interpret)
    outcomes = run_tasks(todo, config, interpret)
    rows = [row_of(task, outcome) for task, outcome in zip(todo, outcomes, strict=True)]

    print_tables(rows)
    found = faults(rows, [result_of(outcome).details for outcome in outcomes])
    print_faults(found)
    write_results(rows, config, seed=config.seed, interpret=interpret, faults=found)
    for impl in config.impl:
        counts = Counter(row["verdict"] for row in rows if row["implementation"] == impl)
        print(f"{impl}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    print(f"--seed={config.seed} repeats the inputs")
    return 1 if found else 0


if __name__ == "__main__":
    run(main, Config)
