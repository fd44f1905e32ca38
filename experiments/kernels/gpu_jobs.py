"""What runs in the process that has the GPU."""

from typing import Any

import jax

from experiments.kernels import timing
from experiments.kernels.measure import Row, measure
from experiments.kernels.shapes import Shape
from experiments.lib import reporting
from pallas_kernels import targets


def facts() -> dict[str, Any]:
    """What there is: versions, the device, its copy bandwidth, how times are taken."""
    sets = [(jax.numpy.ones(1 << 20),)]
    return {
        **reporting.environment(),
        "copy_gb_per_s": 1e-9 * timing.copy_bandwidth(),
        "timing": timing.time_calls(jax.numpy.negative, sets, seconds=0.01).method,
        "cache_bytes": timing.cache_bytes(),
        "target": targets.current(),
    }


def latency(
    name: str,
    shape: Shape,
    copy_gb_per_s: float,
    seconds: float,
    interpret: bool,
    tuning: Any | None = None,
) -> Row:
    """`measure`, with positional arguments."""
    return measure(
        name,
        shape,
        bandwidth=1e9 * copy_gb_per_s,
        seconds=seconds,
        interpret=interpret,
        tuning=tuning,
    )
