"""How long attention takes: an implementation at a shape, its values checked, then timed.

Inputs stand in several sets, used in turn, which together exceed the device's caches several times:
no call finds in them what an earlier one read. On a GPU a call takes as long as CUPTI says that its
kernels take: launches and the gaps between kernels do not count. On a CPU, and where CUPTI is
missing, the host's clock times calls that follow one another.
"""

import contextlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernels.baselines import CONTIGUOUS, attention_for
from experiments.kernels.shapes import Arguments, Shape, random_inputs, relative_error, wanted
from experiments.lib import reporting
from pallas_kernels import targets
from pallas_kernels.lab.worker import Worker
from pallas_kernels.paged_attention import Unsupported

# Timing

Function = Callable[..., Any]

# Together the sets hold this many times what the caches do.
CACHE_MULTIPLE = 4
CPU_CACHE_BYTES = 32 << 20
MAX_SETS = 128
MIN_CALLS, MAX_CALLS = 5, 1000
# For the host's clock several calls make one GPU program and several programs a sample, so that a
# short kernel is not outlasted by its launch, nor by waiting for it.
CALLS_PER_PROGRAM = 8
MIN_SAMPLE_SECONDS = 2e-3
# Kernels of a program run one after the other, as they would alone: no graph, which may run them
# side by side.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
# The size of an array that is copied. A GPU's copy lasts long against its launch; a CPU's allocator
# keeps memory of this size, where larger arrays would time page faults.
COPY_BYTES = {"gpu": 1 << 30, "cpu": 16 << 20}


class Timing(NamedTuple):
    """The time of one call in seconds: the median of many calls, with quartiles."""

    seconds: float
    low: float
    high: float
    calls: int
    method: str  # "profiler" (device time by CUPTI) or "clock" (the host's)


class NoProfiler(RuntimeError):
    """Device times cannot be measured here; the message says why."""


def cache_bytes() -> int:
    """What the device's caches may hold of an earlier call."""
    target = targets.current()
    return CPU_CACHE_BYTES if target is None else target.l2_size


def num_sets(bytes_per_call: int, memory: int | None = None) -> int:
    """How many sets of inputs to rotate; with `memory`, no more than fit into so many bytes."""
    wanted = math.ceil(CACHE_MULTIPLE * cache_bytes() / bytes_per_call)
    fitting = MAX_SETS if memory is None else memory // bytes_per_call
    return max(1, min(wanted, fitting, MAX_SETS))


def time_calls(function: Function, sets: Sequence[Arguments], *, seconds: float = 0.2) -> Timing:
    """Time calls of a function that can be jitted, each with the next of `sets`.

    Warms up, then measures for about `seconds`; at least five calls.
    """
    if jax.default_backend() == "gpu":
        with contextlib.suppress(NoProfiler):  # Timing.method tells
            return profiled_calls(function, sets, seconds)
    return clocked_calls(function, sets, seconds)


def profiled_calls(function: Function, sets: Sequence[Arguments], seconds: float) -> Timing:
    """Device time of all kernels of a call; `NoProfiler` where CUPTI does not give it."""
    jitted = jax.jit(function)
    calls = _calls_within(seconds, _warm_up(jitted, sets, seconds / 2))
    kernels = kernel_seconds(lambda: [jitted(*sets[i % len(sets)]) for i in range(calls)])
    if not kernels or len(kernels) % calls:
        raise NoProfiler(f"CUPTI recorded {len(kernels)} kernels of {calls} equal calls")
    return _timing(np.reshape(kernels, (calls, -1)).sum(axis=1), calls, "profiler")


def kernel_seconds(run: Callable[[], Any]) -> list[float]:
    """Seconds of each GPU kernel that `run` launches, in their order; `NoProfiler`: no CUPTI."""
    try:
        # JAX's profiler of Mosaic GPU kernels times one jitted function on one set of inputs; of
        # its private part, which has neither limit, these two calls are all there is.
        from jax._src.lib import mosaic_gpu

        cupti = mosaic_gpu._mosaic_gpu_ext  # type: ignore[attr-defined]
        stop = cupti._cupti_get_timings
        cupti._cupti_init()
    except (ImportError, AttributeError, RuntimeError) as error:
        raise NoProfiler(f"this JAX has no Mosaic GPU profiler here: {error}") from error
    try:
        jax.block_until_ready(run())
    finally:
        milliseconds = stop(True)
    return [1e-3 * duration for _, duration in milliseconds]


def clocked_calls(function: Function, sets: Sequence[Arguments], seconds: float) -> Timing:
    """The host's clock around programs of one or several calls."""
    on_gpu = jax.default_backend() == "gpu"
    # No set is twice in a program, where the second call of two equal ones would be left out.
    per_program = min(CALLS_PER_PROGRAM, len(sets)) if on_gpu else 1
    jitted = jax.jit(
        lambda *chosen: [function(*arguments) for arguments in chosen],
        compiler_options=NO_GRAPHS if on_gpu else None,
    )
    endless, starts = itertools.cycle(sets), range(0, len(sets), per_program)
    programs = [tuple(itertools.islice(endless, per_program)) for _ in starts]
    estimate = _warm_up(jitted, programs, seconds / 2)
    per_sample = max(1, math.ceil(MIN_SAMPLE_SECONDS / estimate)) if on_gpu else 1
    num_samples = _calls_within(seconds, estimate * per_sample)
    upcoming, samples = itertools.cycle(programs), []
    for _ in range(num_samples):
        start = time.perf_counter()
        for program in itertools.islice(upcoming, per_sample):
            output = jitted(*program)
        jax.block_until_ready(output)
        samples.append((time.perf_counter() - start) / (per_sample * per_program))
    return _timing(samples, num_samples * per_sample * per_program, "clock")


def copy_bandwidth() -> float:
    """Bytes per second of a plain copy; it counts the bytes read and the bytes written.

    The faster of two ways: a kernel that writes every number's complement (which XLA cannot leave
    out), and XLA's own copy of an array.
    """
    num_bytes = COPY_BYTES[jax.default_backend()]
    count = max(2, num_sets(num_bytes))
    arrays = [(jnp.arange(num_bytes // 4, dtype=jnp.uint32),) for _ in range(count)]
    kernel = time_calls(jnp.bitwise_not, arrays).seconds
    copy = clocked_calls(jnp.copy, arrays, 0.2).seconds
    return 2 * num_bytes / min(kernel, copy)


def _warm_up(jitted: Function, sets: Sequence[Arguments], seconds: float) -> float:
    """Compile, then call for `seconds`, three times at least; seconds of a call at its best."""
    jax.block_until_ready(jitted(*sets[0]))
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        jax.block_until_ready(jitted(*sets[len(times) % len(sets)]))
        times.append(time.perf_counter() - start)
    return min(times)


def _calls_within(seconds: float, estimate: float) -> int:
    return min(max(int(seconds / estimate), MIN_CALLS), MAX_CALLS)


def _timing(samples: Sequence[float] | np.ndarray, calls: int, method: str) -> Timing:
    low, median, high = np.quantile(samples, [0.25, 0.5, 0.75])
    return Timing(float(median), float(low), float(high), calls, method)


# Rows of a latency table

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

    `copy_gb_per_s` is the device's `copy_bandwidth()`. The row says so where an
    implementation refuses the shape, and where the inputs do not fit into memory; a fault raises.
    `with_ratios` fills in `ratio`.
    """
    row = partial(empty_row, name, shape, jax.devices()[0].device_kind)
    try:
        attention = attention_for(name, shape, interpret=interpret, tuning=tuning)
        count = num_sets(shape.kv_bytes, _memory_for(shape))
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
        settings: time_calls(attend, sets, seconds=seconds)
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
        "copy_gb_per_s": 1e-9 * copy_bandwidth(),
        "timing": time_calls(jnp.negative, sets, seconds=0.01).method,
        "cache_bytes": cache_bytes(),
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


def tables(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """A table for each geometry, dtype and number of queries, by its title."""
    groups = defaultdict(list)
    for row in rows:
        work = "decode" if row.queries == 1 else f"prefill of {row.queries}"
        title = f"{row.geometry}, {row.dtype}, {work}, {row.device}"
        if row.settings:
            row = row._replace(implementation=f"{row.implementation} ({row.settings})")
        groups[title].append({name: getattr(row, field) for name, field in COLUMNS.items()})
    return dict(groups)
