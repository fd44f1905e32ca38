"""A check as it is planned, called in the process that has the GPU, and entered into the report."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.kernels.measure import Row, empty_row
from experiments.kernels.shapes import Shape
from pallas_kernels.lab.worker import Outcome

Call = tuple[str, tuple[Any, ...]]  # for a worker

# First words of verdicts; any other is a fault.
FINE = ("pass", "right", "refused", "skipped")


class Settings(NamedTuple):
    """What checks share."""

    device: str
    copy_gb_per_s: float
    seconds: float  # about how long a kernel is timed
    interpret: bool
    seed: int


class ValueRow(NamedTuple):
    """An implementation against float64 on random inputs."""

    op: str
    implementation: str
    case: str
    shape: str
    dtype: str
    device: str
    error: float | None  # of the entry that is furthest off, measured by its tolerance
    tolerance: float | None
    seconds: float  # of the check
    verdict: str


@dataclass(frozen=True)
class ValueCheck:
    """One implementation of an op on random inputs of one of the lab's shapes."""

    op: str
    implementation: str
    spec: Any

    def __str__(self) -> str:
        return f"{self.op} {self.implementation}, values: {self.spec.name}"

    def call(self, settings: Settings) -> Call:
        args = (self.implementation, self.spec, settings.seed, settings.interpret, self.op)
        return "pallas_kernels.lab.checks:check_random_values", args

    def row(self, outcome: Outcome, settings: Settings) -> ValueRow:
        result = outcome.value
        if result is None:
            verdict = f"{outcome.status}: {outcome.reason}"
        else:
            verdict = f"{result.verdict}: {result.reason}" if result.reason else result.verdict
        return ValueRow(
            self.op,
            self.implementation,
            self.spec.name,
            self.spec.shape,
            self.spec.dtype,
            settings.device,
            result and result.error,
            result and result.tolerance,
            outcome.seconds,
            verdict,
        )


@dataclass(frozen=True)
class LatencyCheck:
    """One contender at a shape, its values checked, then timed."""

    implementation: str
    shape: Shape

    def __str__(self) -> str:
        return f"attention {self.implementation}, latency: {self.shape}"

    def call(self, settings: Settings) -> Call:
        _, copy_gb_per_s, seconds, interpret, _ = settings
        args = (self.implementation, self.shape, copy_gb_per_s, seconds, interpret)
        return "experiments.kernels.gpu_jobs:latency", args

    def row(self, outcome: Outcome, settings: Settings) -> Row:
        if outcome.value is not None:
            row: Row = outcome.value
            return row
        verdict = f"{outcome.status}: {outcome.reason}"
        return empty_row(self.implementation, self.shape, settings.device, verdict)


Check = ValueCheck | LatencyCheck


def is_fault(verdict: str) -> bool:
    return verdict.split(":")[0] not in FINE


def spoils_process(verdict: str) -> bool:
    """Whether a process may fail at all that it does next: a fault of the device, not of Python."""
    return verdict.split(":")[0] in ("hung", "crashed") or "RuntimeError" in verdict
