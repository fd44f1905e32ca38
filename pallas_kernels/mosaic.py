"""What the kernels in Pallas Mosaic GPU share: loads, stores, a layout of rows, the interpreter."""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.moves import MoveCall

MOSAIC_GPU = "a Pallas Mosaic GPU kernel"  # in messages
LANES, WARPS = 32, 4  # threads of a warp, warps of a warpgroup
VECTOR_BYTES = 16  # the most that a thread loads or stores at a time
DTYPES = ("float32", "bfloat16", "float16")


def refusal(call: MoveCall) -> str | None:
    """Why a kernel that moves rows cannot do the call; None if it can."""
    if call.target is None and not call.options.interpret:
        return "it needs an NVIDIA GPU; interpret=True runs it in Pallas' interpreter"
    if call.dtype.name not in DTYPES:
        return f"caches of {call.dtype} are not supported; choose one of {', '.join(DTYPES)}"
    return None


def interpreter(interpret: bool, detect_races: bool) -> Any:
    """The `interpret` argument of `plgpu.kernel`."""
    return plgpu.InterpretGPUParams(detect_races=detect_races) if interpret else False


def row_layout(rows: int, columns: int, dtype: jnp.dtype) -> Any:
    """How a warpgroup shares an array `[rows, columns]` that it moves, 16 bytes a thread at a time.

    Neighbouring threads take neighbouring columns. Rows are contiguous and any distance apart. An
    array too small to occupy all 128 threads is moved by several threads each.
    """
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
    """Load an array of any size from memory into registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, x: Any) -> None:
    """Store registers to global memory, whole lines or not."""
    if hasattr(plgpu, "store"):  # JAX 0.12; before it, plain stores may miss whole lines
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
