"""Random inputs for paged attention, with traps in all that must not be read."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import DTypeLike

Tables = Literal["random", "permuted", "shared", "repeated"]
# Table entries beyond the context: either would be noticed if it were followed.
UNUSED_ENTRIES = (-1, 10**9)


class AttentionCase(NamedTuple):
    """Inputs of `paged_prefill_attention`. Whatever must not be read is NaN or out of range."""

    q: np.ndarray  # [B, T, Hq, D]
    k_cache: np.ndarray  # [P, Hk, S, D]
    v_cache: np.ndarray  # [P, Hk, S, D]
    tables: np.ndarray  # i32[B, M]
    context_lens: np.ndarray  # i32[B]
    query_starts: np.ndarray  # i32[B]


def make_case(
    rng: np.random.Generator,
    context_lens: Sequence[int],
    *,
    block_size: int,
    max_blocks: int,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    num_queries: int = 1,
    query_starts: Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
    spare_blocks: int = 3,
    tables: Tables = "random",
) -> AttentionCase:
    """Tokens of all rows scattered over a pool of `B * max_blocks + spare_blocks` blocks.

    Block 0, other blocks of no row and slots beyond a context hold NaN; table entries beyond a
    context hold `UNUSED_ENTRIES`. `spare_blocks` is at least 1, for block 0. `query_starts`
    defaults to the end of the context: the last `num_queries` tokens are the queries. `tables`:

    random: every row has blocks of its own, from anywhere in the pool;
    permuted: every row has a range of the pool of its own, in any order;
    shared: full blocks at a row's start are those of the longest row, as after a prefix hit;
    repeated: a row's full blocks are one block, again and again.
    """
    B, S = len(context_lens), block_size
    num_blocks = B * max_blocks + spare_blocks
    cache_shape = (num_blocks, num_kv_heads, S, head_dim)
    block_tables = _tables(rng, tables, context_lens, S, max_blocks, num_blocks)
    k_cache, v_cache = np.full(cache_shape, np.nan, dtype), np.full(cache_shape, np.nan, dtype)
    for row, context in enumerate(context_lens):
        for i in range(-(-context // S)):
            used = min(S, context - i * S)
            for cache in (k_cache, v_cache):
                cache[block_tables[row, i], :, :used] = rng.standard_normal(
                    (num_kv_heads, used, head_dim)
                )
    if query_starts is None:
        query_starts = [context - num_queries for context in context_lens]
    q = rng.standard_normal((B, num_queries, num_heads, head_dim)).astype(dtype)
    lens, starts = np.array(context_lens, np.int32), np.array(query_starts, np.int32)
    return AttentionCase(q, k_cache, v_cache, block_tables, lens, starts)


def _tables(
    rng: np.random.Generator,
    kind: Tables,
    context_lens: Sequence[int],
    block_size: int,
    max_blocks: int,
    num_blocks: int,
) -> np.ndarray:
    """Block tables i32[B, max_blocks] of a kind that `make_case` describes; block 0 is in none."""
    if kind not in get_args(Tables):
        raise ValueError(f"tables must be one of {', '.join(get_args(Tables))}, got {kind!r}")
    B = len(context_lens)
    if kind == "permuted":
        own = rng.permuted(1 + np.arange(B * max_blocks).reshape(B, max_blocks), axis=1)
    else:
        own = rng.permutation(np.arange(1, num_blocks))[: B * max_blocks].reshape(B, max_blocks)
    longest = int(np.argmax(context_lens))
    tables = np.resize(UNUSED_ENTRIES, (B, max_blocks)).astype(np.int32)
    for row, context in enumerate(context_lens):
        needed, full = -(-context // block_size), context // block_size
        tables[row, :needed] = own[row, :needed]
        if kind == "shared":
            tables[row, :full] = own[longest, :full]
        elif kind == "repeated":
            tables[row, :full] = own[row, 0]
    return tables
