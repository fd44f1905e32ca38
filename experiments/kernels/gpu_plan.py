"""The checks to run on a GPU that is there for minutes, in order of importance.

First whether each kernel computes the right numbers, on a few cases; then the shapes that have a
target; then a sample of all geometries, the paper's figures 18a and 18b, all other cases. A check
is called in the process that has the GPU, and becomes a row of the report.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from experiments.kernels.measure import Row, empty_row
from experiments.kernels.shapes import GEOMETRIES, Geometry, Shape
from pallas_kernels.lab.checks import OPS, lab_of
from pallas_kernels.lab.worker import Outcome

# Checks

Call = tuple[str, tuple[Any, ...]]  # for a worker
MEASURE = "experiments.kernels.measure:measure"

# Verdicts that start with these words are no faults.
FINE = ("pass", "right", "refused", "skipped")


class Settings(NamedTuple):
    """The settings that all checks share."""

    device: str
    copy_gb_per_s: float
    seconds: float  # about how long a kernel is timed
    interpret: bool
    seed: int


class ValueRow(NamedTuple):
    """An implementation against float64 on random inputs; `error` as `CheckResult` has it."""

    op: str
    implementation: str
    case: str
    shape: str
    dtype: str
    device: str
    error: float | None
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
        spec, found = self.spec, outcome.value
        status = found.verdict if found else outcome.status
        reason = found.reason if found else outcome.reason
        return ValueRow(
            *(self.op, self.implementation, spec.name, spec.shape, spec.dtype, settings.device),
            error=found and found.error,
            tolerance=found and found.tolerance,
            seconds=outcome.seconds,
            verdict=f"{status}: {reason}" if reason else status,
        )


@dataclass(frozen=True)
class LatencyCheck:
    """One implementation of attention at a shape, its values checked, then timed."""

    implementation: str
    shape: Shape

    def __str__(self) -> str:
        return f"attention {self.implementation}, latency: {self.shape}"

    def call(self, settings: Settings) -> Call:
        _, copy_gb_per_s, seconds, interpret, _ = settings
        args = (self.implementation, self.shape, copy_gb_per_s, seconds, interpret)
        return MEASURE, args

    def row(self, outcome: Outcome, settings: Settings) -> Row:
        verdict = f"{outcome.status}: {outcome.reason}"
        return outcome.value or empty_row(self.implementation, self.shape, settings.device, verdict)


Check = ValueCheck | LatencyCheck


def is_fault(verdict: str) -> bool:
    return verdict.split(":")[0] not in FINE


def spoils_process(verdict: str) -> bool:
    """Whether the process may fail in later calls, too: a fault of the device, not of Python."""
    return verdict.split(":")[0] in ("hung", "crashed") or "RuntimeError" in verdict


# Plans

LLAMA, OPT, SMOLLM2 = (GEOMETRIES[name] for name in ("llama3-8b", "opt-13b", "smollm2"))
# These shapes have targets.
FULL_BATCH = Shape(LLAMA, batch=64, context=4096, block_size=16, dtype="bfloat16")
LONG_CONTEXT = Shape(LLAMA, batch=1, context=32768, block_size=16, dtype="bfloat16")
# Each cache has 2 ** 31 elements, 4 GiB.
LARGE_CACHE = Shape(LLAMA, batch=64, context=32768, block_size=16, dtype="bfloat16")
# A chunk over a history, and a prompt without one: gathered, or read from its blocks?
PREFILLS = (
    replace(FULL_BATCH, batch=4, context=4096, queries=512),
    replace(FULL_BATCH, batch=2, context=2048, queries=2048),
)

OURS = ("mosaic_gpu", "mosaic_gpu_wgmma")
BASELINE = "contiguous"
RIVALS = ("jax_paged", "cudnn_paged")
PREFILLING = (BASELINE, *OURS, "gather_sdpa", "triton", "xla")
EVERYTHING = (*OURS, BASELINE, *RIVALS, "cudnn_contiguous", "triton", "xla", "xla_contiguous")

ATTENTION_SPECS = lab_of("attention").VALUE_SPECS
# The first case of each kind says most about a kernel.
FIRST_SPECS = tuple(
    next(spec for spec in ATTENTION_SPECS if kind in spec.name)
    for kind in ("GQA", "MHA", "cap", "prefill")
)


def full_plan() -> Iterator[Check]:
    """Everything; more than there is time for."""
    yield from value_checks("attention", FIRST_SPECS)
    for shape in (FULL_BATCH, LONG_CONTEXT):
        yield from (LatencyCheck(name, shape) for name in EVERYTHING)
    yield from (LatencyCheck(name, shape) for shape in PREFILLS for name in PREFILLING)
    yield from (LatencyCheck(name, LARGE_CACHE) for name in (*OURS, "triton", "xla"))
    for op in OPS:
        yield from value_checks(op, lab_of(op).VALUE_SPECS[:1])
    yield from grid((BASELINE, "mosaic_gpu", "cudnn_paged"), (64, 8), (4096, 512))
    # Figure 18a, then 18b.
    yield from grid((BASELINE, "mosaic_gpu"), (8, 32), (64, 256), [LLAMA])
    for size in (8, 32, 64, 128):
        yield LatencyCheck("mosaic_gpu", replace(FULL_BATCH, block_size=size))
    for op in OPS:
        yield from value_checks(op, lab_of(op).VALUE_SPECS)
    yield from grid((BASELINE, "mosaic_gpu", "cudnn_paged"), (64, 1, 256), (32768, 4096, 512))
    yield from grid(EVERYTHING, (64, 8, 1, 256), (4096, 512, 32768))


def small_plan() -> Iterator[Check]:
    """The same kinds of check, small enough for the interpreter."""
    yield from value_checks("attention", FIRST_SPECS[:1])
    shape = Shape(Geometry(4, 2, 64), batch=2, context=64, block_size=16, dtype="bfloat16")
    yield from (LatencyCheck(name, shape) for name in EVERYTHING)
    yield from (LatencyCheck(name, replace(shape, queries=8)) for name in PREFILLING)
    yield from value_checks("attention", FIRST_SPECS)


def value_checks(op: str, specs: Sequence[Any]) -> Iterator[Check]:
    """Checks of the op's cases: one case of every implementation before the next."""
    # The plain reference comes last: it is no kernel.
    impls = sorted(lab_of(op).REGISTRY, key=lambda impl: (impl == "reference", impl not in OURS))
    for spec in specs:
        yield from (ValueCheck(op, impl, spec) for impl in impls)


def grid(
    names: Sequence[str],
    batches: Sequence[int],
    contexts: Sequence[int],
    geometries: Sequence[Geometry] = (LLAMA, OPT, SMOLLM2),
) -> Iterator[Check]:
    """Every geometry at a batch and context before the next."""
    for batch, context, geometry in product(batches, contexts, geometries):
        for name in names:
            yield LatencyCheck(name, Shape(geometry, batch, context, 16, "bfloat16"))


def chosen(plan: Iterator[Check], names: Sequence[str] | None) -> list[Check]:
    """Each check once, where it first stands; only those of the named implementations, if any."""
    checks = dict.fromkeys(plan)
    return [check for check in checks if names is None or check.implementation in names]
