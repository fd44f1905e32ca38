"""How far paged attention may be from float64, by the rounding that its contract allows.

The reference takes the inputs as they are after rounding to their dtype, so what is left is:

1. Scores are sums of D products in float32, added in any order and, in tensor cores, truncated
   instead of rounded: each step errs by at most ``EPS`` of the sum of sizes, `score_size`. A few
   more such steps are the scale, the soft cap and the conversion to base 2.
2. A weight's relative error is its score's error, which enters numerator and denominator.
3. Weights are rounded to the caches' dtype for the second product; in the denominator they may be
   summed before or after that. Small ones in float16 are subnormal: their error is absolute.
4. As many products as there are keys are summed in float32, in any order.
5. The output is rounded to its dtype.

These are bounds, not estimates: an error beyond them is a fault. On a GPU, products of float32 are
of operands rounded to TF32 (JAX's default precision), and tanh is approximated.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from pallas_kernels.lab.float64 import Attended

EPS = 2.0**-23  # of float32
TF32_ROUNDING = 2.0**-11  # relative, of one operand
TANH_APPROXIMATION = 2.0**-10.9  # relative, of the GPU's tanh.approx.f32
# Roundings of a score or of a sum that are not of its products.
MORE_STEPS = 16


class Bounds(NamedTuple):
    """Largest absolute errors; shapes of the results that they are of."""

    out: np.ndarray  # [B, T, Hq, D]
    max: np.ndarray  # [B, T, Hq]
    lse: np.ndarray  # [B, T, Hq]


def bounds(
    result: Attended,
    dtype: DTypeLike,
    *,
    largest_value: float,
    soft_cap: float | None = None,
    on_gpu: bool = False,
) -> Bounds:
    """Of results for inputs of a dtype, whose cached values are at most `largest_value` in size."""
    head_size = result.out.shape[-1]
    info = ml_dtypes.finfo(dtype)
    wide = info.bits == 32
    rounding = 0.0 if wide else float(info.eps) / 2
    product = 2 * TF32_ROUNDING if wide and on_gpu else 0.0

    score = result.score_size * (product + (head_size + MORE_STEPS) * EPS)
    if soft_cap is not None:
        score = score + soft_cap * ((TANH_APPROXIMATION if on_gpu else 0.0) + MORE_STEPS * EPS)
    summing = (result.num_keys + MORE_STEPS) * EPS
    finite_lse = np.where(np.isfinite(result.lse), np.abs(result.lse), 0)

    subnormal = float(info.smallest_subnormal) / 2
    size = np.abs(result.out)
    out = (
        2 * score[..., None] * result.value_size
        + (rounding + product) * result.value_size
        + rounding * size
        + result.num_keys[..., None] * subnormal * largest_value
        + summing[..., None] * result.value_size
        + max(rounding, EPS) * size
        + subnormal
    )
    return Bounds(out, score, score + summing + 2 * EPS * finite_lse)
