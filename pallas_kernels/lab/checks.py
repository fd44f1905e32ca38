"""Checks of one implementation on one case: values and races, lowering, what the compiler made.

A check never raises for what the implementation does: that is its verdict. It can hang or take the
process down, though: `worker` is for that.
"""

import importlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from pallas_kernels import targets
from pallas_kernels.lab import aot, interpreter
from pallas_kernels.lab.wanted import compare
from pallas_kernels.registry import Unsupported
from pallas_kernels.targets import TARGETS

# Op -> the module that tells the lab about it; `attention` is the pattern.
OPS = {
    "attention": "pallas_kernels.lab.attention",
    "kv_write": "pallas_kernels.lab.kv_write",
    "block_copy": "pallas_kernels.lab.block_copy",
}

# refused: the implementation says that it does not do this, which is no fault.
Verdict = Literal[
    "pass", "refused", "wrong", "race", "out of bounds", "spills", "failed", "hung", "crashed"
]


@dataclass(frozen=True)
class CheckResult:
    """What a check found; figures are None where the check has none."""

    verdict: Verdict
    reason: str = ""  # in one line
    details: str = ""  # a traceback
    error: float | None = None  # of the entry that is furthest off, relative to its tolerance
    tolerance: float | None = None
    races: bool | None = None  # None: they were not looked for
    kernels: int | None = None  # Pallas kernels that the call starts
    # The largest of these kernels: per thread, in bytes, in bytes.
    registers: int | None = None
    spills: int | None = None
    shared_memory: int | None = None
    # The smallest: programs on a core at once, what limits them, part of the core's threads.
    programs_per_core: int | None = None
    limited_by: str | None = None
    occupancy: float | None = None
    # Instructions in the kernels' text, by kind.
    instructions: dict[str, int] | None = None


def lab_of(op: str) -> Any:
    """The lab's module of an op; ValueError for an unknown name."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; choose one of {', '.join(OPS)}")
    return importlib.import_module(OPS[op])


def check_random_values(
    impl: str, spec: Any, seed: int, interpret: bool, op: str = "attention"
) -> CheckResult:
    """`check_values` on random inputs of a shape; the same for the same seed."""
    lab = lab_of(op)

    def check() -> CheckResult:
        options = lab.value_options(impl, spec, interpret=interpret)
        return _values(lab, impl, lab.make(spec, np.random.default_rng(seed)), options)

    return _judge(check)


def check_values(impl: str, case: Any, options: Any, *, op: str = "attention") -> CheckResult:
    """Run a case and compare it with float64; watch the interpreter where it is used."""
    return _judge(lambda: _values(lab_of(op), impl, case, options))


def _values(lab: Any, impl: str, case: Any, options: Any) -> CheckResult:
    on_gpu = targets.current() is not None and not options.interpret
    arguments = lab.arguments(impl, case)
    call = jax.jit(lab.function(impl, options))
    run = interpreter.watch(lambda: {name: np.asarray(x) for name, x in call(*arguments).items()})
    wanted = lab.wanted(case, options, on_gpu=on_gpu)
    differences = [compare(name, run.result[name], wanted[name]) for name in wanted]
    faults = "; ".join(d.fault for d in differences if d.fault)
    worst = max(differences, key=lambda difference: difference.excess)
    return CheckResult(
        "wrong" if faults else "pass",
        faults,
        error=worst.error,
        tolerance=worst.bound,
        races=False if run.looked_for_races else None,
    )


def check_lowering(
    impl: str, spec: Any, target_name: str, compile: bool, op: str = "attention"
) -> CheckResult:
    """Lower a shape for a GPU that need not be here; with `compile`, report on the machine code."""
    lab, target = lab_of(op), TARGETS[target_name]

    def check() -> CheckResult:
        shapes, options = lab.shapes(impl, spec), lab.compile_options(spec)
        function = lab.function(impl, options)
        if not compile:
            return CheckResult("pass", kernels=len(aot.lower(function, shapes, target)))
        kernels = aot.compile(function, shapes, target).kernels
        if not kernels:
            return CheckResult("pass", kernels=0)
        tightest = min((kernel.occupancy for kernel in kernels), key=lambda o: o.threads)
        spills = max(kernel.spills for kernel in kernels)
        return CheckResult(
            "spills" if spills else "pass",
            f"{spills} bytes of registers are kept in memory" if spills else "",
            kernels=len(kernels),
            registers=max(kernel.registers for kernel in kernels),
            spills=spills,
            shared_memory=max(kernel.shared_memory for kernel in kernels),
            programs_per_core=tightest.programs_per_core,
            limited_by=tightest.limited_by,
            occupancy=tightest.threads,
            instructions={
                name: sum(kernel.instructions[name] for kernel in kernels)
                for name in kernels[0].instructions
            },
        )

    return _judge(check)


def _judge(check: Callable[[], CheckResult]) -> CheckResult:
    """The check's result, or the verdict on what it raised."""
    try:
        return check()
    except Unsupported as error:
        return CheckResult("refused", _line(error).split("cannot do this: ")[-1])
    except interpreter.Race as error:
        return CheckResult("race", _line(error), races=True)
    except interpreter.OutOfBounds as error:
        return CheckResult("out of bounds", _line(error))
    except Exception as error:
        return CheckResult("failed", _cause(error), traceback.format_exc())


def _cause(error: Exception) -> str:
    """The error in a line; if its text is a traceback, as from a callback, the last error in it."""
    lines = re.findall(r"^\w+(?:Error|Exception): .+", str(error), flags=re.MULTILINE)
    return lines[-1] if lines else f"{type(error).__name__}: {_line(error)}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
