"""What to run on a GPU that is there for minutes, in order of importance.

First whether each kernel computes the right numbers, on a few cases; then the shapes that have a
target; then a sample of all geometries, the figures of the paper, all other cases.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from experiments.kernels.gpu_checks import Check, LatencyCheck, ValueCheck
from experiments.kernels.shapes import GEOMETRIES, Geometry, Shape
from pallas_kernels.lab.checks import OPS, lab_of

LLAMA, OPT, SMOLLM2 = (GEOMETRIES[name] for name in ("llama3-8b", "opt-13b", "smollm2"))
# The shapes that have targets.
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
# What says most about a kernel: the first of each kind.
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
    """Of the lab's shapes of an op: one shape of every implementation at a time."""
    # The plain reference last: it is no kernel.
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
