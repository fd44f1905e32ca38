"""Paged attention in XLA, for any device: a loop over chunks of blocks with an online softmax.

Two ideas keep it near the cost of contiguous attention. Temporaries are what a gather costs, so
only a small tile is gathered at a time: about 128 tokens of a few rows, on a CPU as many as stay in
a core's cache. And the work follows the
contexts, not the width of the table: rows are sorted by length and cut into groups, and each group
loops until its longest row is done.

A chunk holds the same tokens whatever the block size (any that divides 128), so the sums run in
the same order and results do not depend on it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult

CHUNK_TOKENS = 128
# Keys and values that a group of rows may gather at a time: what a CPU's caches hold, or enough to
# occupy a GPU. Smaller tiles pay more for starting each operation.
TILE_BYTES = {"cpu": 3 << 20}
DEFAULT_TILE_BYTES = 32 << 20
# A batch of more rows is cut into two groups at least: one long row keeps only half of it waiting.
SMALL_GROUP = 8
# Stands for minus infinity where two are subtracted; below any score.
LOWEST = -1e38


def attend(
    q: Array,  # [B, T, Hq, D]
    k_cache: Array,  # [P, Hk, S, D]
    v_cache: Array,  # [P, Hk, S, D]
    block_tables: Array,  # i32[B, M]
    context_lens: Array,  # i32[B], tokens of the row in the cache, its queries included
    query_starts: Array,  # i32[B], position of the row's first query
    *,
    options: AttentionOptions,
) -> AttentionResult:
    """Query t of row b, at position query_starts[b] + t, sees what stands at or before it."""
    B, T, Hq, D = q.shape
    Hk, S = k_cache.shape[1:3]
    G = Hq // Hk
    blocks_per_chunk = max(1, CHUNK_TOKENS // S)
    chunk = blocks_per_chunk * S

    first_chunk = jnp.zeros_like(context_lens)
    if options.sliding_window is not None:
        first_chunk = jnp.maximum(query_starts + 1 - options.sliding_window, 0) // chunk
    num_chunks = jnp.maximum(-(-context_lens // chunk) - first_chunk, 0)

    tile_bytes = TILE_BYTES.get(jax.default_backend(), DEFAULT_TILE_BYTES)
    tile_rows = max(1, tile_bytes // (2 * chunk * Hk * D * k_cache.dtype.itemsize))
    group = min(B, tile_rows, max(SMALL_GROUP, -(-B // 2)))
    num_groups = -(-B // group)
    rows = jnp.arange(B) if num_groups == 1 else jnp.argsort(-num_chunks)

    def grouped(x: Array) -> Array:
        """Sort rows by length, fill up with rows of zeros, cut: [B, ...] -> [groups, rows, ...]."""
        x = jnp.pad(x[rows], [(0, num_groups * group - B), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(num_groups, group, *x.shape[1:])

    q_rows = q.reshape(B, T, Hk, G, D).transpose(0, 2, 1, 3, 4).reshape(B, Hk, T * G, D)
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks_per_chunk)))
    inputs = (q_rows, tables, context_lens, query_starts, first_chunk, num_chunks)

    def one_group(args: Any) -> tuple[Array, Array, Array]:
        return _attend_group(k_cache, v_cache, *args, chunk=chunk, T=T, options=options)

    out, top, total = lax.map(one_group, jax.tree.map(grouped, inputs))

    def ungrouped(x: Array) -> Array:
        """[groups, rows, Hk, T * G, ...] -> [B, T, Hq, ...], rows in the caller's order."""
        x = x.reshape(num_groups * group, Hk, T, G, *x.shape[4:])[:B]
        x = x[jnp.argsort(rows)] if num_groups > 1 else x
        return x.swapaxes(1, 2).reshape(B, T, Hq, *x.shape[4:])

    empty = total == 0
    return AttentionResult(
        out=ungrouped(out / jnp.where(empty, 1, total)[..., None]).astype(q.dtype),
        max=ungrouped(jnp.where(empty, -jnp.inf, top)),
        lse=ungrouped(jnp.where(empty, -jnp.inf, top + jnp.log(total))),
    )


def _attend_group(
    k_cache: Array,  # [P, Hk, S, D]
    v_cache: Array,  # [P, Hk, S, D]
    q: Array,  # [W, Hk, T * G, D]
    tables: Array,  # i32[W, M]
    context_lens: Array,  # i32[W]
    query_starts: Array,  # i32[W]
    first_chunk: Array,  # i32[W]
    num_chunks: Array,  # i32[W]
    *,
    chunk: int,
    T: int,
    options: AttentionOptions,
) -> tuple[Array, Array, Array]:
    """Unnormalised output f32[W, Hk, T * G, D], max and sum f32[W, Hk, T * G] of W rows."""
    W, Hk, TG, D = q.shape
    P, _, S, _ = k_cache.shape
    # Blocks of one head are contiguous; as rows of a matrix they are gathered without a transpose.
    k_blocks, v_blocks = k_cache.reshape(P * Hk, S, D), v_cache.reshape(P * Hk, S, D)
    heads = jnp.arange(Hk)[:, None]
    positions = query_starts[:, None] + jnp.repeat(jnp.arange(T), TG // T)  # [W, T * G]

    def step(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        i, top, total, out = state
        at = first_chunk + i  # i32[W]
        entries = at[:, None] * (chunk // S) + jnp.arange(chunk // S)
        used = entries * S < context_lens[:, None]
        # Entries beyond the context may hold anything: they are replaced, never followed.
        blocks = jnp.take_along_axis(tables, entries, axis=1, mode="clip")
        ids = jnp.where(used, blocks, 0)[:, None, :] * Hk + heads  # [W, Hk, blocks]
        slots = at[:, None] * chunk + jnp.arange(chunk)  # [W, chunk]
        written = slots < context_lens[:, None]
        visible = written[:, None] & (slots[:, None] <= positions[..., None])
        if options.sliding_window is not None:
            visible &= slots[:, None] > positions[..., None] - options.sliding_window

        def gather(cache: Array) -> Array:  # [W, Hk, chunk, D]
            x = cache.at[ids].get(mode="promise_in_bounds").reshape(W, Hk, chunk, D)
            return jnp.where(written[:, None, :, None], x, 0)  # unused slots may hold NaN

        # Keys first: XLA's CPU products are faster so, by a quarter.
        scores = options.scale * jnp.einsum(
            "whcd,whqd->whcq", gather(k_blocks), q, preferred_element_type=jnp.float32
        ).swapaxes(2, 3)
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(visible[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        v = gather(v_blocks)
        new_out = jnp.einsum(
            "whqc,whcd->whqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        total = total * shrink + jnp.sum(weights, axis=-1)
        return i + 1, new_top, total, out * shrink[..., None] + new_out

    longest = jnp.max(num_chunks)
    start = (
        jnp.int32(0),
        jnp.full((W, Hk, TG), LOWEST),
        jnp.zeros((W, Hk, TG)),
        jnp.zeros((W, Hk, TG, D)),
    )
    _, top, total, out = lax.while_loop(lambda state: state[0] < longest, step, start)
    return out, top, total
