"""Random inputs for paged attention, and what must come out, in float64 numpy."""

from dataclasses import dataclass

import numpy as np

# What stands in table entries beyond the context: both would be noticed if they were followed.
UNUSED_ENTRIES = (-1, 10**9)


@dataclass(frozen=True)
class Case:
    """Inputs of `paged_prefill_attention`. Whatever must not be read is NaN or out of range."""

    q: np.ndarray  # [B, T, Hq, D]
    k_cache: np.ndarray  # [P, Hk, S, D]
    v_cache: np.ndarray  # [P, Hk, S, D]
    tables: np.ndarray  # i32[B, M]
    context_lens: np.ndarray  # i32[B]
    query_starts: np.ndarray  # i32[B]

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.tables,
            self.context_lens,
            self.query_starts,
        )

    @property
    def decode_arrays(self) -> tuple[np.ndarray, ...]:
        """Of `paged_attention`: the first query of each row."""
        return self.q[:, 0], self.k_cache, self.v_cache, self.tables, self.context_lens


def make_case(
    rng: np.random.Generator,
    context_lens: list[int],
    *,
    block_size: int,
    max_blocks: int,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    num_queries: int = 1,
    query_starts: list[int] | None = None,
    dtype: type = np.float32,
    spare_blocks: int = 3,
) -> Case:
    """Tokens of all rows scattered over a pool of `B * max_blocks + spare_blocks` blocks.

    Block 0, blocks of no row and slots beyond each context hold NaN. `query_starts` defaults to
    the end of the context: the last `num_queries` tokens are the queries.
    """
    B, S = len(context_lens), block_size
    num_blocks = B * max_blocks + spare_blocks
    shape = (num_blocks, num_kv_heads, S, head_dim)
    k_cache, v_cache = np.full(shape, np.nan, dtype), np.full(shape, np.nan, dtype)
    free = list(rng.permutation(np.arange(1, num_blocks)))
    tables = np.resize(UNUSED_ENTRIES, (B, max_blocks)).astype(np.int32)
    for row, context in enumerate(context_lens):
        for i in range(-(-context // S)):
            block = tables[row, i] = free.pop()
            used = min(S, context - i * S)
            for cache in (k_cache, v_cache):
                cache[block, :, :used] = rng.standard_normal((num_kv_heads, used, head_dim))
    if query_starts is None:
        query_starts = [context - num_queries for context in context_lens]
    return Case(
        rng.standard_normal((B, num_queries, num_heads, head_dim)).astype(dtype),
        k_cache,
        v_cache,
        tables,
        np.array(context_lens, np.int32),
        np.array(query_starts, np.int32),
    )


def expected(
    case: Case,
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out [B, T, Hq, D], max [B, T, Hq], log-sum-exp [B, T, Hq]), query by query in float64."""
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
