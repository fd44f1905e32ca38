"""NVIDIA's compute-sanitizer over one value check, where it is installed.

    python -m experiments.kernels.sanitizer IMPLEMENTATION CASE

runs the check alone, for the sanitizer to watch.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from pallas_kernels.lab.checks import check_random_values, lab_of

COMMAND = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck")
# JAX asks the driver for things that the driver may refuse, which is no error of a kernel.
OPTIONS = ("--report-api-errors", "no", "--target-processes", "all", "--print-limit", "5")
# Each array has an allocation of its own, so that an access past its end is noticed.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (.*)")


def find() -> str | None:
    """The command, on the path or with a CUDA toolkit."""
    return shutil.which(COMMAND) or shutil.which(COMMAND, path="/usr/local/cuda/bin")


def run(command: str, tool: str, impl: str, case: str, timeout_s: float) -> dict[str, Any]:
    """A row of the report; the sanitizer's summary is the verdict."""
    row = {"tool": tool, "implementation": impl, "case": case}
    try:
        done = subprocess.run(
            [command, "--tool", tool, *OPTIONS, sys.executable, "-m", __name__, impl, case],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return row | {"verdict": f"skipped: it took more than {timeout_s:.0f} s"}
    return row | {"verdict": verdict(done.stdout + done.stderr)}


def verdict(output: str) -> str:
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


def main(impl: str, case: str) -> None:
    (spec,) = (spec for spec in lab_of("attention").VALUE_SPECS if spec.name == case)
    print(f"check: {check_random_values(impl, spec, 0, False).verdict}")


if __name__ == "__main__":
    main(*sys.argv[1:])
