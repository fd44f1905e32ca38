"""How long a jitted function takes on the device, and how fast the device moves bytes.

Inputs stand in several sets, used in turn, which together exceed the device's caches several times:
no call finds in them what an earlier one read. On a GPU a call takes as long as CUPTI says that its
kernels take: launches and the gaps between kernels do not count. On a CPU, and where CUPTI is
missing, the host's clock times calls that follow one another.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import targets

Function = Callable[..., Any]
Arguments = tuple[Any, ...]

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
