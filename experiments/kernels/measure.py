"""One row of a latency table: an implementation at a shape, its values checked, then timed."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels import timing
from experiments.kernels.baselines import CONTIGUOUS, attention_for
from experiments.kernels.shapes import Shape, random_inputs, relative_error, wanted
from experiments.lib import reporting
from pallas_kernels import targets
from pallas_kernels.lab.worker import Worker
from pallas_kernels.paged_attention import Unsupported

# Largest error, as a part of the output's norm. The output and the weights are each rounded to the
# dtype; a GPU's float32 products have operands rounded to TF32. A block of 16 tokens in the wrong
# place of 32768 errs by 0.03.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}
# Inputs, and the arrays that they are made from, may take this part of a device's memory.
MEMORY_SHARE = 0.8
CPU_MEMORY_BYTES = 4 << 30
START_LIMIT_S = 120.0


class Row(NamedTuple):
    """Times in microseconds: the median of a call, and quartiles. None: not measured."""

    implementation: str
    settings: str  # of the fastest variant
    geometry: str
    batch: int
    context: int
    queries: int
    block_size: int | None  # None: contiguous
    dtype: str
    device: str  # as JAX names it
    error: float | None = None  # norm of the difference from float32 attention over its norm
    time_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    method: str | None = None  # of timing
    gb_per_s: float | None = None  # keys and values of the contexts over the time
    copy_fraction: float | None = None  # of the device's measured copy bandwidth
    ratio: float | None = None  # of the time to that of the contiguous baseline
    verdict: str = "right"  # or "wrong", "refused" or "failed", and why

    @property
    def same_case(self) -> tuple[object, ...]:
        """Equal for rows of one implementation that do the same work, in blocks of one size."""
        return self.implementation, self.block_size, self.same_inputs

    @property
    def same_inputs(self) -> tuple[object, ...]:
        """Equal for rows that do the same work."""
        return self.geometry, self.batch, self.context, self.queries, self.dtype


def empty_row(name: str, shape: Shape, device: str, verdict: str) -> Row:
    """The row of an implementation that was not timed."""
    block_size = None if name in CONTIGUOUS else shape.block_size
    work = (str(shape.geometry), shape.batch, shape.context, shape.queries)
    return Row(name, "", *work, block_size, shape.dtype, device, verdict=verdict)


def measure(
    name: str,
    shape: Shape,
    copy_gb_per_s: float,
    seconds: float = 0.2,
    interpret: bool = False,
    tuning: Any | None = None,
    seed: int = 0,
) -> Row:
    """Check the values of all variants, then time each for about `seconds`; the fastest counts.

    `copy_gb_per_s` is the device's `timing.copy_bandwidth()`. The row says so where an
    implementation refuses the shape, and where the inputs do not fit into memory; a fault raises.
    `with_ratios` fills in `ratio`.
    """
    row = partial(empty_row, name, shape, jax.devices()[0].device_kind)
    try:
        attention = attention_for(name, shape, interpret=interpret, tuning=tuning)
        count = timing.num_sets(shape.kv_bytes, _memory_for(shape))
        inputs = random_inputs(shape, seed)
        target = wanted(inputs)
        sets = [  # the same numbers at other places; the last set has the inputs themselves
            attention.prepare(jax.tree.map(jnp.copy, inputs) if place else inputs, place)
            for place in reversed(range(count))
        ]
        del inputs
        errors = {
            settings: relative_error(jax.jit(attend)(*sets[0]), target)
            for settings, attend in attention.variants.items()
        }
    except Unsupported as refusal:
        return row(f"refused: {refusal}")
    worst = max(errors, key=lambda settings: np.nan_to_num(errors[settings], nan=np.inf))
    error, tolerance = errors[worst], TOLERANCE[shape.dtype]
    if not error <= tolerance:
        wrong = row(f"wrong: relative error {error:.2g}, at most {tolerance:g}")
        return wrong._replace(settings=worst, error=error if np.isfinite(error) else None)
    times = {
        settings: timing.time_calls(attend, sets, seconds=seconds)
        for settings, attend in attention.variants.items()
    }
    settings, time = min(times.items(), key=lambda item: item[1].seconds)
    gb_per_s = 1e-9 * shape.kv_bytes / time.seconds
    return row("right")._replace(
        settings=settings,
        error=errors[settings],
        time_us=1e6 * time.seconds,
        low_us=1e6 * time.low,
        high_us=1e6 * time.high,
        method=time.method,
        gb_per_s=gb_per_s,
        copy_fraction=gb_per_s / copy_gb_per_s,
    )


def _memory_for(shape: Shape) -> int:
    """Bytes that all sets may take; `Unsupported` if the shape's inputs do not fit into them."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() == "gpu" else None
    available = stats["bytes_limit"] if stats else CPU_MEMORY_BYTES
    # The arrays that the last set is made from lie beside the sets, perhaps transposed, too.
    memory = int(MEMORY_SHARE * available) - 2 * shape.kv_bytes
    if memory < shape.kv_bytes:
        needed, there = (f"{size / 2**30:.1f} GiB" for size in (shape.kv_bytes, available))
        arrays = f"keys and values of {needed}, and copies to make them"
        raise Unsupported(f"{arrays}, do not fit into {there}")
    return memory


def facts() -> dict[str, Any]:
    """The versions, the device, its copy bandwidth, and how times are taken."""
    sets = [(jnp.ones(1 << 20),)]
    return {
        **reporting.environment(),
        "copy_gb_per_s": 1e-9 * timing.copy_bandwidth(),
        "timing": timing.time_calls(jnp.negative, sets, seconds=0.01).method,
        "cache_bytes": timing.cache_bytes(),
        "target": targets.current(),
    }


def facts_from(worker: Worker) -> dict[str, Any]:
    """`facts` from a worker's process; ValueError if JAX does not start there."""
    outcome = worker.call(f"{__name__}:facts", (), START_LIMIT_S)
    if outcome.value is None:
        raise ValueError(f"JAX does not start: {outcome.reason}\n{outcome.details}")
    return dict(outcome.value)


def with_ratios(rows: Sequence[Row], baseline: str) -> list[Row]:
    """The rows with their time over that of `baseline` on the same inputs by the same method."""
    own = [row for row in rows if row.implementation == baseline]
    bases = {(row.same_inputs, row.method): row.time_us for row in own}

    def ratio(row: Row) -> float | None:
        base = bases.get((row.same_inputs, row.method))
        return row.time_us / base if row.time_us and base else None

    return [row._replace(ratio=ratio(row)) for row in rows]


COLUMNS = {  # title -> field of a row
    "implementation": "implementation",
    "batch": "batch",
    "context": "context",
    "block": "block_size",
    "error": "error",
    "µs": "time_us",
    "by": "method",
    "GB/s": "gb_per_s",
    "of copy": "copy_fraction",
    "ratio": "ratio",
    "verdict": "verdict",
}


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[str], list[list[Any]]]]:
    """(title, columns, cells) of a table for each geometry, dtype and number of queries."""
    groups: dict[str, list[list[Any]]] = {}
    for row in rows:
        work = "decode" if row.queries == 1 else f"prefill of {row.queries}"
        title = f"{row.geometry}, {row.dtype}, {work}, {row.device}"
        if row.settings:
            row = row._replace(implementation=f"{row.implementation} ({row.settings})")
        groups.setdefault(title, []).append([getattr(row, field) for field in COLUMNS.values()])
    yield from ((title, list(COLUMNS), cells) for title, cells in groups.items())
