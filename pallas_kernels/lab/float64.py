"""The results of paged attention in float64 numpy, and how far a kernel's may be from them.

The reference takes the inputs as they are after rounding to their dtype. `bounds` allows for the
rounding that is left:

1. Scores are sums of D products in float32, added in any order and, in tensor cores, truncated
   instead of rounded: each step errs by at most `EPS` of the sum of sizes, `score_size`. A few
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

from pallas_kernels.lab.cases import AttentionCase

EPS = 2.0**-23  # of float32
TF32_ROUNDING = 2.0**-11  # relative, of one operand
TANH_APPROXIMATION = 2.0**-10.9  # relative, of the GPU's tanh.approx.f32
# Roundings of a score or of a sum that are not of its products.
MORE_STEPS = 16


class Attended(NamedTuple):
    """Results in float64, and the sizes of the summands, on which rounding errors depend."""

    out: np.ndarray  # [B, T, Hq, D]
    max: np.ndarray  # [B, T, Hq], the largest score
    lse: np.ndarray  # [B, T, Hq], log of the sum of exp(score)
    # Largest of scale * sum(|q_i| |k_i|) over the keys that a query sees.
    score_size: np.ndarray  # [B, T, Hq]
    # Mean of |v|, weighted as the mean of v that is `out`.
    value_size: np.ndarray  # [B, T, Hq, D]
    num_keys: np.ndarray  # [B, T, 1], that a query sees


def attended(
    case: AttentionCase,
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
) -> Attended:
    """Attention of a case. A query that sees nothing has output 0, max and log-sum-exp -inf."""
    B, T, Hq, D = case.q.shape
    _, Hk, S, _ = case.k_cache.shape
    G = Hq // Hk
    result = Attended(
        out=np.zeros((B, T, Hq, D)),
        max=np.full((B, T, Hq), -np.inf),
        lse=np.full((B, T, Hq), -np.inf),
        score_size=np.zeros((B, T, Hq)),
        value_size=np.zeros((B, T, Hq, D)),
        num_keys=np.zeros((B, T, 1), np.int64),
    )
    for b, context in enumerate(case.context_lens):
        slots = np.arange(context)
        blocks = case.tables[b, slots // S]
        positions = case.query_starts[b] + np.arange(T)
        visible = slots <= positions[:, None]  # [T, context]
        if sliding_window is not None:
            visible &= slots > positions[:, None] - sliding_window
        result.num_keys[b, :, 0] = visible.sum(axis=1)
        seeing = visible.any(axis=1)
        mask = visible[seeing, None]  # [T', 1, context], T' of the T queries see something
        for h in range(Hk):
            heads = slice(h * G, (h + 1) * G)
            keys = case.k_cache[blocks, h, slots % S].astype(np.float64)  # [context, D]
            values = case.v_cache[blocks, h, slots % S].astype(np.float64)
            q = case.q[b, seeing, heads].astype(np.float64)  # [T', G, D]
            scores = q @ keys.T * scale  # [T', G, context]
            sizes = np.abs(q) @ np.abs(keys).T * abs(scale)
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            top = scores.max(axis=-1, where=mask, initial=-np.inf)
            weights = np.where(mask, np.exp(scores - top[..., None]), 0)
            total = weights.sum(axis=-1)
            weights /= total[..., None]
            result.out[b, seeing, heads] = weights @ values
            result.max[b, seeing, heads] = top
            result.lse[b, seeing, heads] = top + np.log(total)
            result.score_size[b, seeing, heads] = sizes.max(axis=-1, where=mask, initial=0)
            result.value_size[b, seeing, heads] = weights @ np.abs(values)
    return result


class Bounds(NamedTuple):
    """The largest absolute error that each entry of a result may have."""

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
    """Bounds for inputs of a dtype whose cached values are at most `largest_value` in size."""
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
