"""For Mosaic GPU kernels that move whole rows: from memory to registers and back, 16 bytes a time.

A warpgroup moves an array ``[rows, columns]`` whose rows are contiguous and any distance apart. The
arrays may be of any size; where they are too small to occupy its 128 threads, several threads move
the same elements.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moves import MoveCall, MoveOptions

LANES, WARPS = 32, 4  # threads of a warp, warps of a warpgroup
VECTOR_BYTES = 16  # the most that a thread loads or stores at a time
DTYPES = ("float32", "bfloat16", "float16")


def refusal(call: MoveCall) -> str | None:
    """Why a kernel of this kind cannot do a call; None if it can."""
    if call.target is None and not call.options.interpret:
        return "it needs an NVIDIA GPU; interpret=True runs it in Pallas' interpreter"
    if call.dtype.name not in DTYPES:
        return f"caches of {call.dtype} are not supported; choose one of {', '.join(DTYPES)}"
    return None


def interpreter(options: MoveOptions) -> Any:
    """The ``interpret`` argument of `plgpu.kernel`."""
    return (
        plgpu.InterpretGPUParams(detect_races=options.detect_races) if options.interpret else False
    )


def row_layout(rows: int, columns: int, dtype: jnp.dtype) -> Any:
    """How the threads of a warpgroup share ``[rows, columns]``: neighbours along the columns."""
    vector = math.gcd(columns, VECTOR_BYTES // dtype.itemsize)
    lanes = math.gcd(columns // vector, LANES)
    lane_rows = math.gcd(rows, LANES // lanes)
    warps = math.gcd(rows // lane_rows, WARPS)
    width = lanes * vector
    layout = fragments.TiledLayout(
        # A tile becomes [warps, 1, lane_rows, lanes, 1, vector].
        fragments.Tiling(((warps * lane_rows, width), (lane_rows, width), (1, vector))),
        warp_dims=(-6, fragments.Replicated(WARPS // warps)),
        lane_dims=(-4, -3, fragments.Replicated(LANES // (lanes * lane_rows))),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def load(ref: Any, layout: Any) -> Any:
    """Rows of an array in global memory, into registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, rows: Any) -> None:
    """Rows in registers, into an array in global memory."""
    if hasattr(plgpu, "store"):  # JAX 0.12, where a plain store must fill whole lines
        plgpu.store(ref, rows, optimized=False)
    else:
        ref[...] = rows
