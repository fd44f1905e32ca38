"""Every kernel on the GPU of this machine, in minutes: right or wrong, and how fast.

    scripts/gpu_check.sh --out_dir=out/gpu_check
    scripts/gpu_check.sh --impl=mosaic_gpu,contiguous --time_limit_s=120
    scripts/gpu_check.sh --dry_run           without a GPU: the same on tiny shapes, interpreted

For a machine that is there for a few minutes, with a JAX of its own and nothing installed. It runs
what matters most first: each kernel against float64, then the shapes that have a target, then other
geometries, batches and contexts, the paper's figures 18a and 18b, all other cases of the lab, and
NVIDIA's compute-sanitizer where there is one. After every check results.json and table.md in
--out_dir are written anew; at the time limit, or when it is stopped, they have all that was found.
One process at a time has the GPU: a kernel that hangs, fails or takes it down costs its own check
alone, and after three of these its implementation is left out.

Exit code 1: something was wrong, failed, hung or crashed. Checks for which no time was left are
listed, and are no fault.
"""

import secrets
import signal
import sys
import time

from absl import flags

from experiments.kernels import gpu_plan as plan
from experiments.kernels import sanitizer
from experiments.kernels.gpu_checks import Settings
from experiments.kernels.gpu_report import Report
from experiments.kernels.gpu_runner import run_checks, run_sanitizer
from experiments.lib import reporting
from pallas_kernels import extras
from pallas_kernels.lab.worker import Worker

_OUT_DIR = flags.DEFINE_string("out_dir", "out/gpu_check", "Where the results go.")
_TIME_LIMIT_S = flags.DEFINE_float("time_limit_s", 340, "For everything.", lower_bound=1)
_CHECK_LIMIT_S = flags.DEFINE_float("check_limit_s", 40, "For one check.", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.1, "About how long a kernel is timed.", lower_bound=0)
_IMPL = flags.DEFINE_list("impl", None, "Only these kernels and contenders; default: all.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Tiny shapes and interpreted kernels, on a CPU.")

START_LIMIT_S = 120.0
SANITIZER_S = 60.0  # kept for the sanitizer, where there is one
# Memory that a killed process had may be given back a moment after its end.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def start(worker: Worker, report: Report) -> Settings:
    """Open the device in the worker's process; ValueError if it is not the one that is meant."""
    outcome = worker.call("experiments.kernels.gpu_jobs:facts", (), START_LIMIT_S)
    if outcome.value is None:
        raise ValueError(f"JAX does not start: {outcome.reason}\n{outcome.details}")
    report.facts = {**outcome.value, "seed": secrets.randbelow(2**32), "argv": sys.argv[1:]}
    platform = report.facts["device_platform"]
    if (platform == "gpu") == _DRY_RUN.value:
        missing = "" if platform == "gpu" else extras.missing_for_gpu()
        raise ValueError(
            f"JAX's device is a {platform}; --dry_run is for a CPU, and only for it"
            + (f"; {missing}" if missing else "")
        )
    return Settings(
        device=report.facts["device_kind"],
        copy_gb_per_s=report.facts["copy_gb_per_s"],
        seconds=_SECONDS.value,
        interpret=_DRY_RUN.value,
        seed=report.facts["seed"],
    )


def main() -> None:
    deadline = time.monotonic() + _TIME_LIMIT_S.value
    report = Report(reporting.make_out_dir(_OUT_DIR.value))
    # A time limit of others: the worker is stopped on the way out, the files are whole already.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    checks = plan.chosen(plan.small_plan() if _DRY_RUN.value else plan.full_plan(), _IMPL.value)
    command = None if _DRY_RUN.value else sanitizer.find()
    try:
        with Worker(ENVIRONMENT) as worker:
            settings = start(worker, report)
            print(report.summary(), flush=True)
            reserved = SANITIZER_S if command else 0
            run_checks(
                checks,
                worker,
                report,
                settings,
                deadline=deadline - reserved,
                limit_s=_CHECK_LIMIT_S.value,
            )
        if command:
            run_sanitizer(command, report, deadline)
        report.state = "finished"
    finally:
        report.write()
    report.print()
    print(f"results in {report.out_dir}", flush=True)
    if report.faults():
        sys.exit(1)


if __name__ == "__main__":
    reporting.run(main)
