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

import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from experiments.kernels import gpu_plan, sanitizer
from experiments.kernels.gpu_plan import Check, Settings
from experiments.kernels.gpu_report import Report
from experiments.kernels.measure import facts_from
from experiments.lib import Options, option, run
from pallas_kernels import extras
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
    for tool, implementation in product(sanitizer.TOOLS, gpu_plan.OURS):
        left = deadline - time.monotonic()
        if left < LEAST_S:
            report.not_run.append(f"compute-sanitizer {tool}: {implementation}")
            continue
        row = sanitizer.run(command, tool, implementation, gpu_plan.FIRST_SPECS[0].name, left)
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
    command = None if config.dry_run else sanitizer.find()
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
