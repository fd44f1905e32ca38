"""Whether a kernel is right, free of races, and compiles well for each GPU; a GPU is not needed.

    python -m experiments.kernels.check --impl=mosaic_gpu
    python -m experiments.kernels.check --impl=my_folder.my_kernel --case=window --target=H200
    python -m experiments.kernels.check --op=kv_write --impl=xla

An implementation is a name in the op's registry or a module that holds one. Each case runs in a
process that is killed when it takes too long, so that a kernel that waits forever is one bad row.

values    Fresh random inputs against float64: NaN stands in all that must not be read, and table
          entries beyond a context lead nowhere. The seed is printed; --seed repeats a run. Without
          a GPU, kernels run in Pallas' interpreter, which also reports races and accesses out of
          bounds. The tolerance follows from the rounding that the dtypes allow
          (pallas_kernels/lab/float64.py).
lowering  Each target's lowering of shapes of real models. With the `aot` extra, also the machine
          code: registers, spills, shared memory, how many programs fit on a core, instructions.

A kernel may refuse a case with a reason; that is no failure, unless it refuses all of a kind. Exits
with 1 when anything failed. Expect less than a minute on two CPU cores. --out_dir gets results.json
and results.csv with a row for each case.
"""

import os
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.lib.experiment import run
from experiments.lib.options import Options, option
from experiments.lib.reporting import print_rows, write_results
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
    checks: tuple[str, ...] = option(
        tuple(CHECKS), "These checks run.", quick=("values",), choices=CHECKS
    )
    case: str = option("", "Only cases with this text in their name run.")
    target: tuple[str, ...] = option(
        tuple(TARGETS), "Kernels are lowered and compiled for these GPUs.", choices=TARGETS
    )
    interpret: bool | None = option(
        None, "Kernels are interpreted on the CPU. By default they are where there is no GPU."
    )
    timeout_s: float = option(60.0, "A case may take so long (s).", least=0.1)
    workers: int = option(min(os.cpu_count() or 1, 8), "So many processes run at once.", least=1)
    seed: int = option(secrets.randbits(32), "Seed of the inputs. By default a new one.", least=0)
    out_dir: str = option("out/kernel_check", "Folder for the results.")


@dataclass(frozen=True)
class Task:
    """One check of one case, and the device that it runs on or the GPU that it is for."""

    kind: str  # of `CHECKS`
    impl: str
    spec: Any
    where: str
    arguments: tuple[Any, ...]


def tasks(config: Config, device: str, interpret: bool) -> list[Task]:
    """All that the options ask for; ValueError if that is nothing."""
    lab, compile = lab_of(config.op), aot.is_available()
    seeds = np.random.SeedSequence(config.seed).generate_state(len(lab.VALUE_SPECS))
    found: list[Task] = []
    for impl in config.impl:
        if "values" in config.checks:
            found += [
                Task("values", impl, spec, device, (impl, spec, int(seed), interpret, config.op))
                for spec, seed in zip(lab.VALUE_SPECS, seeds, strict=True)
            ]
        if "lowering" in config.checks:
            found += [
                Task("lowering", impl, spec, target, (impl, spec, target, compile, config.op))
                for spec in lab.COMPILE_SPECS
                for target in config.target
            ]
    chosen = [task for task in found if config.case in task.spec.name]
    if not chosen:
        names = dict.fromkeys(task.spec.name for task in found)
        raise ValueError(f"no case has {config.case!r} in its name; there are {', '.join(names)}")
    return chosen


def run_tasks(todo: list[Task], config: Config, interpret: bool) -> list[worker.Outcome]:
    """The outcomes of the tasks, in their order."""
    on_device = [task for task in todo if task.kind == "values" and not interpret]
    on_host = [task for task in todo if task.kind != "values" or interpret]
    outcomes: dict[Task, worker.Outcome] = {}
    with tqdm(total=len(todo), unit="case") as bar:
        # One process at a time has the GPU.
        for own, num_workers, env in (
            (on_device, 1, {}),
            (on_host, config.workers, {"JAX_PLATFORMS": "cpu"}),
        ):
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
        result: CheckResult = outcome.value
        return result
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
    for impl in dict.fromkeys(row["implementation"] for row in rows):
        for kind, line_of in (("values", values_line), ("lowering", lowering_line)):
            own = [row for row in rows if (row["implementation"], row["check"]) == (impl, kind)]
            if own:
                where = f" on {own[0]['where']}" if kind == "values" else ""
                print_rows(f"{impl}: {kind}{where}", map(line_of, own))
    if (reason := aot.missing()) and any(row["check"] == "lowering" for row in rows):
        print(f"no machine code was looked at: {reason}")


def values_line(row: Row) -> Row:
    """The columns of a table of values."""
    return {
        **{name: row[name] for name in ("case", "shape", "dtype", "error", "tolerance")},
        "races": RACES[row["races"]],
        "s": row["seconds"],
        "verdict": verdict_of(row),
    }


def lowering_line(row: Row) -> Row:
    """The columns of a table of lowering."""
    return {
        "case": row["case"],
        "GPU": row["where"],
        **{name: row[name] for name in ("registers", "spills")},
        "shared memory": row["shared_memory"],
        "programs per core": occupancy_of(row),
        "instructions": instructions_of(row),
        "verdict": verdict_of(row),
    }


def verdict_of(row: Row) -> str:
    """The verdict, with the reason of a refusal; faults' reasons stand below the tables."""
    return f"refused: {row['reason']}" if row["verdict"] == "refused" else row["verdict"]


def occupancy_of(row: Row) -> str | None:
    """Programs that a core runs at once, what limits them, the part of its threads in use."""
    if row["occupancy"] is None:
        return None
    return f"{row['programs_per_core']} ({row['limited_by']}), {row['occupancy']:.0%}"


def instructions_of(row: Row) -> str | None:
    """The kernel's instructions, as "80 mma.sync, 4 TMA"; None if they are not known."""
    if row["kernels"] == 0:
        return "no Pallas kernel"
    counts = [(row[name], SHORT_NAMES.get(name, name)) for name in ptx.INSTRUCTIONS]
    return ", ".join(f"{count} {name}" for count, name in counts if count) or None


def faults(rows: Sequence[Row], details: Sequence[str]) -> list[dict[str, str]]:
    """The faults that make the run fail, each in a line; `details` has the details of each row."""
    found = []
    for row, detail in zip(rows, details, strict=True):
        if row["verdict"] not in GOOD:
            where = f"{row['implementation']}, {row['case']}, {row['where']}"
            fault = f"{where}: {row['verdict']}: {row['reason']}"
            found.append({"fault": fault, "details": detail})
    for impl in dict.fromkeys(row["implementation"] for row in rows):
        own = [row for row in rows if row["implementation"] == impl]
        # A GPU may lack what a kernel needs, so all lowering may be refused, but not all values.
        values = [row for row in own if row["check"] == "values"]
        if {row["verdict"] for row in values or own} == {"refused"}:
            fault = f"{impl}: every case is refused, so nothing was checked"
            found.append({"fault": fault, "details": ""})
    return found


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
