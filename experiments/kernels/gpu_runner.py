"""Running checks in their order, each with what is left of the time."""

import time
from collections import Counter
from collections.abc import Sequence

from experiments.kernels import gpu_plan as plan
from experiments.kernels import sanitizer
from experiments.kernels.gpu_checks import Check, Settings, spoils_process
from experiments.kernels.gpu_report import Report
from pallas_kernels.lab.worker import Worker

LEAST_S = 5.0  # a check is not begun with less than this left
MAX_LOSSES = 3  # processes that an implementation may cost


def run_checks(
    checks: Sequence[Check],
    worker: Worker,
    report: Report,
    settings: Settings,
    *,
    deadline: float,
    limit_s: float,
) -> None:
    """Run them in their order until they, or the time, are at an end; `limit_s` is for one."""
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
        if spoils_process(row.verdict):
            losses[name] += 1
            worker.close()
        report.add(row, outcome.details or getattr(outcome.value, "details", ""))
        print(f"{deadline - time.monotonic():4.0f} s left. {check}: {row.verdict}", flush=True)


def run_sanitizer(command: str, report: Report, deadline: float) -> None:
    """Each of its tools over each of our kernels, while there is time."""
    for tool in sanitizer.TOOLS:
        for implementation in plan.OURS:
            left = deadline - time.monotonic()
            if left < LEAST_S:
                report.not_run.append(f"compute-sanitizer {tool}: {implementation}")
                continue
            row = sanitizer.run(command, tool, implementation, plan.FIRST_SPECS[0].name, left)
            report.sanitizer.append(row)
            report.write()
            print(f"compute-sanitizer {tool}, {implementation}: {row['verdict']}", flush=True)
