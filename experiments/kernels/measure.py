"""One row of a latency table: a contender at a shape, its values checked, then timed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels import timing
from experiments.kernels.baselines import CONTIGUOUS, contender
from experiments.kernels.shapes import Shape, random_inputs, relative_error, wanted
from pallas_kernels.paged_attention import Unsupported

# Of the norm of the output. The output and the weights are each rounded to the dtype; float32
# products are of operands rounded to TF32 on a GPU. A block of 16 tokens in the wrong place of
# 32768 errs by 0.03.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}
# The part of a device's memory that inputs may take, with what making them takes.
MEMORY_SHARE = 0.8
CPU_MEMORY_BYTES = 4 << 30


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
    device: str
    error: float | None  # norm of the difference from float32 attention over the norm of that
    time_us: float | None
    low_us: float | None
    high_us: float | None
    method: str | None  # of timing
    gb_per_s: float | None  # keys and values of the contexts over the time
    copy_fraction: float | None  # of the device's measured copy bandwidth
    ratio: float | None  # of the time to that of the contiguous baseline
    verdict: str  # "right"; or "wrong", "refused" or "failed", and why

    @property
    def same_inputs(self) -> tuple[object, ...]:
        """Equal for rows that do the same work."""
        return self.geometry, self.batch, self.context, self.queries, self.dtype


def empty_row(name: str, shape: Shape, device: str, verdict: str) -> Row:
    """Of a contender that was not timed on the device, as JAX names that."""
    return Row(
        implementation=name,
        settings="",
        geometry=str(shape.geometry),
        batch=shape.batch,
        context=shape.context,
        queries=shape.queries,
        block_size=None if name in CONTIGUOUS else shape.block_size,
        dtype=shape.dtype,
        device=device,
        verdict=verdict,
        **dict.fromkeys(
            ("error", "time_us", "low_us", "high_us", "method", "gb_per_s", "copy_fraction")
        ),
        ratio=None,
    )


def measure(
    name: str,
    shape: Shape,
    *,
    bandwidth: float,
    seconds: float = 0.2,
    interpret: bool = False,
    tuning: Any | None = None,
) -> Row:
    """Check the values of all variants, then time each for about `seconds`; the fastest counts.

    `bandwidth` is `timing.copy_bandwidth()`. What a contender refuses, or what does not fit into
    memory, is a row that says so; a fault raises. `ratio` is left to `with_ratios`.
    """
    device = jax.devices()[0].device_kind
    try:
        chosen = contender(name, shape, interpret=interpret, tuning=tuning)
        count = timing.num_sets(shape.kv_bytes, _memory_for(shape))
        inputs = random_inputs(shape, seed=0)
        target = wanted(inputs)
        sets = []
        for seed in range(count):  # the same numbers at other places
            own = inputs if seed == count - 1 else jax.tree.map(jnp.copy, inputs)
            sets.append(chosen.prepare(own, seed))
        del inputs, own
        errors = {
            settings: relative_error(jax.jit(attend)(*sets[0]), target)
            for settings, attend in chosen.variants.items()
        }
    except Unsupported as refusal:
        return empty_row(name, shape, device, f"refused: {refusal}")
    worst = max(errors, key=lambda settings: np.nan_to_num(errors[settings], nan=np.inf))
    if not errors[worst] <= TOLERANCE[shape.dtype]:
        reason = f"wrong: relative error {errors[worst]:.2g}, at most {TOLERANCE[shape.dtype]:g}"
        row = empty_row(name, shape, device, reason)
        return row._replace(settings=worst, error=_finite(errors[worst]))
    times = {
        settings: timing.time_calls(attend, sets, seconds=seconds)
        for settings, attend in chosen.variants.items()
    }
    settings = min(times, key=lambda settings: times[settings].seconds)
    time = times[settings]
    rate = shape.kv_bytes / time.seconds
    return empty_row(name, shape, device, "right")._replace(
        settings=settings,
        error=errors[settings],
        time_us=1e6 * time.seconds,
        low_us=1e6 * time.low,
        high_us=1e6 * time.high,
        method=time.method,
        gb_per_s=1e-9 * rate,
        copy_fraction=rate / bandwidth,
    )


def with_ratios(rows: Sequence[Row], baseline: str) -> list[Row]:
    """The rows with their time over that of `baseline` on the same inputs by the same method."""
    bases = {
        (row.same_inputs, row.method): row.time_us for row in rows if row.implementation == baseline
    }

    def ratio(row: Row) -> float | None:
        base = bases.get((row.same_inputs, row.method))
        return row.time_us / base if row.time_us and base else None

    return [row._replace(ratio=ratio(row)) for row in rows]


def _memory_for(shape: Shape) -> int:
    """Bytes that all sets may take; `Unsupported` if the shape's inputs do not fit into them."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() == "gpu" else None
    available = stats["bytes_limit"] if stats else CPU_MEMORY_BYTES
    # Beside the sets stands what the last is made from: contiguous, and perhaps transposed.
    memory = int(MEMORY_SHARE * available) - 2 * shape.kv_bytes
    if memory < shape.kv_bytes:
        raise Unsupported(
            f"keys and values of {shape.kv_bytes / 2**30:.1f} GiB, and copies to make them, do not "
            f"fit into {available / 2**30:.1f} GiB"
        )
    return memory


def _finite(x: float) -> float | None:
    return x if np.isfinite(x) else None
