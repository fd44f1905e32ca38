"""What must come out of paged attention, in float64 numpy."""

from typing import NamedTuple

import numpy as np

from pallas_kernels.lab.cases import Case


class Attended(NamedTuple):
    """Results in float64, and the sizes of what was summed up, on which rounding errors depend."""

    out: np.ndarray  # [B, T, Hq, D]
    max: np.ndarray  # [B, T, Hq], the largest score
    lse: np.ndarray  # [B, T, Hq], log of the sum of exp(score)
    # Largest of scale * sum(|q_i| |k_i|) over the keys that a query sees.
    score_size: np.ndarray  # [B, T, Hq]
    # Mean of |v|, weighted as the mean of v that is `out`.
    value_size: np.ndarray  # [B, T, Hq, D]
    num_keys: np.ndarray  # [B, T, 1], that a query sees


def attended(
    case: Case,
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


def expected(
    case: Case,
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out [B, T, Hq, D], max [B, T, Hq], log-sum-exp [B, T, Hq]) of `attended`."""
    return attended(case, scale=scale, soft_cap=soft_cap, sliding_window=sliding_window)[:3]
