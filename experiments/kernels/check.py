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
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.lib import reporting
from pallas_kernels import targets
from pallas_kernels.lab import aot, ptx, worker
from pallas_kernels.lab.checks import OPS, CheckResult, lab_of
from pallas_kernels.targets import TARGETS

_IMPL = flags.DEFINE_list("impl", None, "Implementations: registered names or modules.")
_OP = flags.DEFINE_enum("op", "attention", list(OPS), "What they implement.")
_CHECKS = flags.DEFINE_list("checks", ["values", "lowering"], "Which checks to run.")
_CASE = flags.DEFINE_string("case", "", "Run only cases with this in their name.")
_TARGET = flags.DEFINE_list("target", list(TARGETS), "GPUs to lower and compile for.")
_INTERPRET = flags.DEFINE_boolean(
    "interpret", None, "Interpret kernels on the CPU; by default where there is no GPU."
)
_SEED = flags.DEFINE_integer("seed", None, "Of the inputs; by default a new one.", lower_bound=0)
_TIMEOUT_S = flags.DEFINE_float("timeout_s", 60, "Of one case, in seconds.", lower_bound=0.1)
_WORKERS = flags.DEFINE_integer(
    "workers", min(os.cpu_count() or 1, 8), "Processes at once.", lower_bound=1
)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/kernel_check", "Where the results go.")
flags.mark_flag_as_required("impl")

FAULTS_SHOWN, DETAIL_LINES = 10, 20
GOOD = ("pass", "refused")
RACES = {None: None, False: "none", True: "found"}
SHORT_NAMES = {"cp.async.bulk.tensor": "TMA", "fence.proxy.async": "fence.proxy"}


@dataclass(frozen=True)
class Task:
    """One check of one case, and where it runs or what it is for."""

    kind: str  # "values" or "lowering"
    impl: str
    spec: Any
    where: str  # a device or a target
    call: tuple[str, tuple[Any, ...]]  # for a worker


def tasks(device: str, interpret: bool, seed: int) -> list[Task]:
    """All that the flags ask for; ValueError if that is nothing."""
    op, lab = _OP.value, lab_of(_OP.value)
    compile = aot.is_available()
    found = []
    for impl in _IMPL.value:
        if "values" in _CHECKS.value:
            seeds = np.random.SeedSequence(seed).generate_state(len(lab.VALUE_SPECS))
            for spec, own_seed in zip(lab.VALUE_SPECS, map(int, seeds), strict=True):
                args = (impl, spec, own_seed, interpret, op)
                call = ("pallas_kernels.lab.checks:check_random_values", args)
                found.append(Task("values", impl, spec, device, call))
        if "lowering" in _CHECKS.value:
            for spec in lab.COMPILE_SPECS:
                for target in _TARGET.value:
                    call = (
                        "pallas_kernels.lab.checks:check_lowering",
                        (impl, spec, target, compile, op),
                    )
                    found.append(Task("lowering", impl, spec, target, call))
    chosen = [task for task in found if _CASE.value in task.spec.name]
    if not chosen:
        names = dict.fromkeys(task.spec.name for task in found)
        raise ValueError(f"no case has {_CASE.value!r} in its name; there are {', '.join(names)}")
    return chosen


def run(todo: list[Task], interpret: bool) -> list[tuple[CheckResult, float]]:
    """The tasks' results, in their order, and how long each took in seconds."""
    results: dict[int, tuple[CheckResult, float]] = {}
    on_device = [] if interpret else [i for i, task in enumerate(todo) if task.kind == "values"]
    on_host = [i for i in range(len(todo)) if i not in on_device]
    with tqdm(total=len(todo), unit="case") as bar:
        # One process at a time has the GPU.
        for indices, num_workers, env in (
            (on_device, 1, {}),
            (on_host, _WORKERS.value, {"JAX_PLATFORMS": "cpu"}),
        ):
            calls = [todo[i].call for i in indices]
            ended = worker.run_all(calls, _TIMEOUT_S.value, num_workers=num_workers, env=env)
            for position, outcome in ended:
                task = todo[indices[position]]
                results[indices[position]] = (result_of(outcome), outcome.seconds)
                bar.set_postfix_str(f"{task.impl} {task.spec.name} {task.where}")
                bar.update()
    return [results[i] for i in range(len(todo))]


def result_of(outcome: worker.Outcome) -> CheckResult:
    """A check's result, or what became of it."""
    if outcome.status == "returned":
        result: CheckResult = outcome.value
        return result
    verdict = "failed" if outcome.status == "raised" else outcome.status
    return CheckResult(verdict, outcome.reason, outcome.details)


def row(task: Task, result: CheckResult, seconds: float) -> dict[str, Any]:
    """One line of results.json; None where a check has no such figure."""
    instructions = result.instructions or {}
    return {
        "check": task.kind,
        "implementation": task.impl,
        "case": task.spec.name,
        "shape": task.spec.shape,
        "dtype": task.spec.dtype,
        "where": task.where,
        "verdict": result.verdict,
        "reason": result.reason,
        "error": result.error,
        "tolerance": result.tolerance,
        "races": result.races,
        "kernels": result.kernels,
        "registers": result.registers,
        "spills": result.spills,
        "shared_memory": result.shared_memory,
        "programs_per_core": result.programs_per_core,
        "limited_by": result.limited_by,
        "occupancy": result.occupancy,
        **{name: instructions.get(name) for name in ptx.INSTRUCTIONS},
        "seconds": seconds,
    }


def print_tables(rows: list[dict[str, Any]]) -> None:
    """For each implementation a table of each kind of check."""
    for impl in dict.fromkeys(row["implementation"] for row in rows):
        own = [row for row in rows if row["implementation"] == impl]
        if values := [row for row in own if row["check"] == "values"]:
            print_lines(f"{impl}: values on {values[0]['where']}", map(values_line, values))
        if lowered := [row for row in own if row["check"] == "lowering"]:
            print_lines(f"{impl}: lowering", map(lowering_line, lowered))
    if (reason := aot.missing()) and any(row["check"] == "lowering" for row in rows):
        print(f"no machine code was looked at: {reason}")


def print_lines(title: str, lines: Iterable[dict[str, object]]) -> None:
    """A table of lines, which have the columns of the first."""
    lines = list(lines)
    reporting.print_table(title, list(lines[0]), [list(line.values()) for line in lines])


def values_line(row: dict[str, Any]) -> dict[str, object]:
    """What a table of values shows."""
    return {
        **{name: row[name] for name in ("case", "shape", "dtype", "error", "tolerance")},
        "races": RACES[row["races"]],
        "s": row["seconds"],
        "verdict": verdict_of(row),
    }


def lowering_line(row: dict[str, Any]) -> dict[str, object]:
    """What a table of lowering shows."""
    return {
        "case": row["case"],
        "GPU": row["where"],
        **{name: row[name] for name in ("registers", "spills")},
        "shared memory": row["shared_memory"],
        "programs per core": occupancy_of(row),
        "instructions": instructions_of(row),
        "verdict": verdict_of(row),
    }


def verdict_of(row: dict[str, Any]) -> str:
    """The verdict, with the reason of a refusal; faults' reasons stand below the tables."""
    return f"refused: {row['reason']}" if row["verdict"] == "refused" else row["verdict"]


def occupancy_of(row: dict[str, Any]) -> str | None:
    """Programs that a core runs at once, what limits them, the part of its threads in use."""
    if row["occupancy"] is None:
        return None
    return f"{row['programs_per_core']} ({row['limited_by']}), {row['occupancy']:.0%}"


def instructions_of(row: dict[str, Any]) -> str | None:
    """What stands in the kernel, as "80 mma.sync, 4 TMA"; None if that is not known."""
    if row["kernels"] == 0:
        return "no Pallas kernel"
    counts = [(row[name], SHORT_NAMES.get(name, name)) for name in ptx.INSTRUCTIONS]
    return ", ".join(f"{count} {name}" for count, name in counts if count) or None


def faults(rows: list[dict[str, Any]], details: list[str]) -> list[dict[str, str]]:
    """What makes the run fail: in words, and in detail, of which there is one for each row."""
    found = []
    for row, detail in zip(rows, details, strict=True):
        if row["verdict"] not in GOOD:
            where = f"{row['implementation']}, {row['case']}, {row['where']}"
            found.append(
                {"fault": f"{where}: {row['verdict']}: {row['reason']}", "details": detail}
            )
    for impl in dict.fromkeys(row["implementation"] for row in rows):
        own = [row for row in rows if row["implementation"] == impl]
        # A GPU may lack what a kernel needs, so all lowering may be refused, but not all values.
        values = [row for row in own if row["check"] == "values"]
        if {row["verdict"] for row in values or own} == {"refused"}:
            fault = f"{impl}: every case is refused, so nothing was checked"
            found.append({"fault": fault, "details": ""})
    return found


def print_faults(found: list[dict[str, str]]) -> None:
    """A line for each of the first ones, and the end of what the first one has of detail."""
    for fault in found[:FAULTS_SHOWN]:
        print(fault["fault"])
    if len(found) > FAULTS_SHOWN:
        print(f"… and {len(found) - FAULTS_SHOWN} more")
    if detail := next((fault["details"] for fault in found if fault["details"]), None):
        print("\n".join(detail.splitlines()[-DETAIL_LINES:]))
        print("(the end of the first fault's details; all are in results.json)")


def main() -> None:
    if unknown := set(_CHECKS.value) - {"values", "lowering"}:
        raise ValueError(f"--checks takes values and lowering, got {', '.join(sorted(unknown))}")
    if unknown := set(_TARGET.value) - set(TARGETS):
        raise ValueError(f"--target takes {', '.join(TARGETS)}, got {', '.join(sorted(unknown))}")
    for impl in _IMPL.value:
        try:
            lab_of(_OP.value).REGISTRY.module(impl)
        except ImportError as error:
            raise ValueError(f"cannot import the implementation {impl}: {error}") from error
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    # The workers need the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    interpret = targets.current() is None if _INTERPRET.value is None else _INTERPRET.value
    device = "CPU" if interpret else jax.devices()[0].device_kind
    seed = secrets.randbits(32) if _SEED.value is None else _SEED.value

    todo = tasks(device, interpret, seed)
    results = run(todo, interpret)
    rows = [row(task, *result) for task, result in zip(todo, results, strict=True)]

    print_tables(rows)
    found = faults(rows, [result.details for result, _ in results])
    print_faults(found)
    reporting.write_cases(rows, out_dir, _IMPL, seed=seed, interpret=interpret, faults=found)
    for impl in _IMPL.value:
        counts = Counter(row["verdict"] for row in rows if row["implementation"] == impl)
        print(f"{impl}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    print(f"--seed={seed} repeats the inputs; results in {out_dir}")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    reporting.run(main)
