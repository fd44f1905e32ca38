"""Paged attention in XLA, for any device: chunks of blocks, gathered a few at a time.

Two ideas keep it near the cost of contiguous attention. Temporaries are what a gather costs, so
only a small tile of keys and values is gathered at a time. And the work follows the contexts, not
the width of the table nor the longest row: every row's context is cut into chunks of about 128
tokens, the chunks of all rows are numbered through, and a loop takes a tile of them in each turn,
whichever rows they belong to, into an online softmax for each row.

A chunk holds the same tokens whatever the block size (any that divides 128), so the sums run in
the same order and results do not depend on it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call
from pallas_kernels.paged_attention.splits import LOWEST

CHUNK_TOKENS = 128
# Keys and values that a turn of the loop gathers: as much as a CPU's caches hold, or enough to
# occupy a GPU. Smaller tiles pay more for starting each operation.
TILE_BYTES = {"cpu": 3 << 20}
DEFAULT_TILE_BYTES = 32 << 20


def refusal(call: Call) -> str | None:
    """Why it cannot do the call; None if it can."""
    tuning = call.options.tuning
    return None if tuning is None else f"it has nothing to tune, got {tuning!r}"


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
    arrays = (q, k_cache, v_cache, block_tables, context_lens, query_starts)
    return _attend(options, *arrays)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(
    options: AttentionOptions,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    query_starts: Array,
) -> AttentionResult:
    B, T, Hq, D = q.shape
    P, Hk, S, _ = k_cache.shape
    G = Hq // Hk
    blocks_per_chunk = max(1, CHUNK_TOKENS // S)
    chunk = blocks_per_chunk * S
    tile_bytes = TILE_BYTES.get(jax.default_backend(), DEFAULT_TILE_BYTES)
    tile = max(1, tile_bytes // (2 * chunk * Hk * D * k_cache.dtype.itemsize))
    # C chunks in a turn: no more than a few short rows have, and, as each turn rescales all rows,
    # not far fewer than there are rows.
    C = max(min(tile, max(4, B)), B // 4)

    # A wrong context does not make the loop endless.
    context_lens = jnp.minimum(context_lens, block_tables.shape[1] * S)
    first_chunk = jnp.zeros_like(context_lens)
    if options.sliding_window is not None:
        first_chunk = jnp.maximum(query_starts + 1 - options.sliding_window, 0) // chunk
    num_chunks = jnp.maximum(-(-context_lens // chunk) - first_chunk, 0)
    ends = jnp.cumsum(num_chunks)  # chunks of row b are numbered from ends[b - 1] to ends[b] - 1

    grouped = q.reshape(B, T, Hk, G, D).transpose(0, 2, 1, 3, 4).reshape(B, Hk, T * G, D)
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % blocks_per_chunk)))
    # Blocks of one head are contiguous; as rows of a matrix they are gathered without a transpose.
    k_blocks, v_blocks = k_cache.reshape(P * Hk, S, D), v_cache.reshape(P * Hk, S, D)
    heads = jnp.arange(Hk)[:, None]
    offsets = jnp.repeat(jnp.arange(T), G)  # [T * G]

    def turn(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        i, top, total, out = state
        number = i * C + jnp.arange(C)
        row = jnp.minimum(jnp.sum(number[:, None] >= ends, axis=1), B - 1)  # i32[C]
        at = first_chunk[row] + number - (ends - num_chunks)[row]  # chunk within the row
        context = jnp.where(number < ends[-1], context_lens[row], 0)[:, None]

        entries = at[:, None] * blocks_per_chunk + jnp.arange(blocks_per_chunk)
        blocks = tables.at[row[:, None], entries].get(mode="clip")
        # Entries beyond the context may hold anything: they are replaced, never followed.
        blocks = jnp.where(entries * S < context, blocks, 0)
        ids = blocks[:, None, :] * Hk + heads  # [C, Hk, blocks_per_chunk]
        slots = at[:, None] * chunk + jnp.arange(chunk)  # [C, chunk]
        written = slots < context
        positions = query_starts[row][:, None] + offsets  # [C, T * G]
        visible = written[:, None] & (slots[:, None] <= positions[..., None])
        if options.sliding_window is not None:
            visible &= slots[:, None] > positions[..., None] - options.sliding_window

        def gather(cache: Array) -> Array:  # [C, Hk, chunk, D]
            x = cache.at[ids].get(mode="promise_in_bounds").reshape(C, Hk, chunk, D)
            return jnp.where(written[:, None, :, None], x, 0)  # unused slots may hold NaN

        # Keys first: XLA's CPU products are faster so, by a quarter.
        scores = options.scale * jnp.einsum(
            "chsd,chqd->chsq", gather(k_blocks), grouped[row], preferred_element_type=jnp.float32
        ).swapaxes(2, 3)
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(visible[:, None], scores, -jnp.inf)

        # For each row: the largest score so far, and the factor by which its sums shrink. Chunks
        # are scattered to their rows, so that a NaN stays in its own row.
        new_top = top.at[row].max(jnp.max(scores, axis=-1))  # [B, Hk, T * G]
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[row][..., None])
        v = gather(v_blocks)
        values = jnp.einsum(
            "chqs,chsd->chqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        new_total = (total * shrink).at[row].add(jnp.sum(weights, axis=-1))
        new_out = (out * shrink[..., None]).at[row].add(values)
        return i + 1, new_top, new_total, new_out

    num_turns = -(-ends[-1] // C)
    start = (
        jnp.int32(0),
        jnp.full((B, Hk, T * G), LOWEST, jnp.float32),
        jnp.zeros((B, Hk, T * G), jnp.float32),
        jnp.zeros((B, Hk, T * G, D), jnp.float32),
    )
    _, top, total, out = lax.while_loop(lambda state: state[0] < num_turns, turn, start)

    def ungrouped(x: Array) -> Array:  # [B, Hk, T * G, ...] -> [B, T, Hq, ...]
        x = x.reshape(B, Hk, T, G, *x.shape[3:]).swapaxes(1, 2)
        return x.reshape(B, T, Hq, *x.shape[4:])

    empty = total == 0
    return AttentionResult(
        out=ungrouped(out / jnp.where(empty, 1, total)[..., None]).astype(q.dtype),
        max=ungrouped(jnp.where(empty, -jnp.inf, top)),
        lse=ungrouped(jnp.where(empty, -jnp.inf, top + jnp.log(total))),
    )


@_attend.defjvp
def _derivatives(options: AttentionOptions, primals: Any, tangents: Any) -> Any:
    """Those of `reference`, which has no loop of unknown length that could not be reversed."""
    rows = primals[3:]

    def plain(q: Array, k_cache: Array, v_cache: Array) -> AttentionResult:
        return reference.attend(q, k_cache, v_cache, *rows, options=options)

    return _attend(options, *primals), jax.jvp(plain, primals[:3], tangents[:3])[1]
