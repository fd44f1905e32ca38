"""What must come out of paged attention, query by query in float64 numpy."""

import numpy as np

from pallas_kernels.lab.cases import Case


def expected(
    case: Case,
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out [B, T, Hq, D], max [B, T, Hq], log-sum-exp [B, T, Hq]), all float64.

    A query that sees nothing has output 0, max and log-sum-exp -inf.
    """
    B, T, Hq, D = case.q.shape
    _, Hk, S, _ = case.k_cache.shape
    out = np.zeros((B, T, Hq, D))
    top, lse = np.full((B, T, Hq), -np.inf), np.full((B, T, Hq), -np.inf)
    for b in range(B):
        for t in range(T):
            position = case.query_starts[b] + t
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            span = np.arange(first, min(position + 1, case.context_lens[b]))
            if not span.size:
                continue
            blocks = case.tables[b, span // S]
            for h in range(Hq):
                keys = case.k_cache[blocks, h * Hk // Hq, span % S].astype(np.float64)
                values = case.v_cache[blocks, h * Hk // Hq, span % S].astype(np.float64)
                scores = keys @ case.q[b, t, h].astype(np.float64) * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                top[b, t, h] = scores.max()
                weights = np.exp(scores - top[b, t, h])
                lse[b, t, h] = top[b, t, h] + np.log(weights.sum())
                out[b, t, h] = weights @ values / weights.sum()
    return out, top, lse
