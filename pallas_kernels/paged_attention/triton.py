"""Paged attention in Pallas Triton: the fallback for calls that Mosaic GPU rejects.

Blocks of any size, 1 and 12 included, float32, and head sizes that are no power of two: every token
of a tile finds its block by itself, so a tile may span blocks or end within one. JAX has deprecated
Pallas Triton and warns of it when this kernel is lowered; in a JAX without it `refusal` says so.

A program attends a tile of query rows, the queries and query heads of one KV head, to its share of
what they see. Shares are cut from what is seen, not from the table's width.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.derivatives import without_derivatives
from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call
from pallas_kernels.paged_attention.splits import LOWEST, combine_splits
from pallas_kernels.registry import Unsupported
from pallas_kernels.targets import TARGETS, current

DTYPES = ("bfloat16", "float16", "float32")
MAX_HEAD_SIZE = 256
# For the rule of tuning: bytes of a tile of keys, and the fewest tokens that are worth a split.
TILE_BYTES = 16 << 10
SHARE_TOKENS = 512


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@dataclass(frozen=True)
class TritonTuning:
    """Sizes of a program's work. ValueError for sizes that Triton cannot do.

    block_kv: tokens of a tile of keys and values.
    block_rows: query rows of a program: queries times query heads per KV head.
    num_splits: programs that share the context of a tile of query rows.
    num_warps: warps of a program.
    num_stages: tiles in flight, the one in use included.
    """

    block_kv: int
    block_rows: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name in ("block_kv", "block_rows"):
            size = getattr(self, name)
            if not (_is_power_of_two(size) and 16 <= size <= 256):
                raise ValueError(f"{name} must be 16, 32, 64, 128 or 256, got {size}")
        if not (_is_power_of_two(self.num_warps) and self.num_warps <= 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps}")
        for name in ("num_splits", "num_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def default_tuning(call: Call) -> TritonTuning:
    """A tuning by rule: tiles fit the registers of every GPU, and splits just occupy it."""
    rows = call.num_queries * (call.num_heads // call.num_kv_heads)
    # Products of float32 have no tensor cores; their factors fill the registers.
    most_rows = 16 if call.dtype == jnp.float32 else 64
    block_rows = min(most_rows, max(16, pl.next_power_of_2(rows)))
    lane_bytes = _num_lanes(call.head_size) * call.dtype.itemsize
    target = call.target or TARGETS["H200"]
    programs = call.batch * call.num_kv_heads * pl.cdiv(rows, block_rows)
    wanted = pl.cdiv(2 * target.num_cores, programs)
    worthwhile = call.max_blocks * call.block_size // SHARE_TOKENS
    return TritonTuning(
        block_kv=min(64, TILE_BYTES // lane_bytes),
        block_rows=block_rows,
        num_splits=max(1, min(wanted, worthwhile)),
        num_warps=8 if block_rows == 64 else 4,
    )


def refusal(call: Call) -> str | None:
    """Why this kernel cannot do the call; None if it can."""
    options = call.options
    try:
        _pallas_triton()
    except Unsupported as error:
        return str(error)
    if call.target is None and not options.interpret:
        return "it needs an NVIDIA GPU; interpret=True runs it in Pallas' interpreter"
    if call.dtype.name not in DTYPES:
        return f"it takes {', '.join(DTYPES)}, not {call.dtype.name}"
    if call.head_size > MAX_HEAD_SIZE:
        return f"it takes head sizes up to {MAX_HEAD_SIZE}, not {call.head_size}"
    if not isinstance(options.tuning, TritonTuning | None):
        return f"its tuning is a TritonTuning, not {options.tuning!r}"
    return None


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
    q, k_cache, v_cache = without_derivatives("a Pallas Triton kernel", q, k_cache, v_cache)
    B, T, Hq, D = q.shape
    P, Hk, S, _ = k_cache.shape
    M = block_tables.shape[1]
    call = Call(B, T, Hq, Hk, D, S, P, M, q.dtype, options, current())
    tuning = options.tuning or default_tuning(call)
    assert isinstance(tuning, TritonTuning)
    triton = _pallas_triton()
    num_tiles = pl.cdiv(T * (Hq // Hk), tuning.block_rows)
    statistics = jax.ShapeDtypeStruct((tuning.num_splits, B, T, Hq), jnp.float32)
    out, top, total = pl.pallas_call(
        functools.partial(_program, options=options, tuning=tuning, num_tiles=num_tiles),
        grid=(num_tiles * tuning.num_splits, Hk, B),
        out_shape=(
            jax.ShapeDtypeStruct((*statistics.shape, D), jnp.float32),
            statistics,
            statistics,
        ),
        compiler_params=triton.CompilerParams(
            num_warps=tuning.num_warps, num_stages=tuning.num_stages
        ),
        interpret=options.interpret,
        name="paged_attention_triton",
    )(q, k_cache, v_cache, block_tables, context_lens, query_starts)
    return combine_splits(out, top, total, q.dtype)


def _program(
    q_ref: Any,  # [B, T, Hq, D]
    k_ref: Any,  # [P, Hk, S, D]
    v_ref: Any,  # [P, Hk, S, D]
    tables_ref: Any,  # i32[B, M]
    contexts_ref: Any,  # i32[B]
    starts_ref: Any,  # i32[B]
    out_ref: Any,  # f32[N, B, T, Hq, D]
    top_ref: Any,  # f32[N, B, T, Hq]
    total_ref: Any,  # f32[N, B, T, Hq]
    *,
    options: AttentionOptions,
    tuning: TritonTuning,
    num_tiles: int,
) -> None:
    """Rows of a tile are numbered t * G + g: query t, query head g of the KV head."""
    triton = _pallas_triton()
    _, T, Hq, D = q_ref.shape
    _, Hk, S, _ = k_ref.shape
    G = Hq // Hk
    split, tile = lax.div(pl.program_id(0), num_tiles), lax.rem(pl.program_id(0), num_tiles)
    kv_head, b = pl.program_id(1), pl.program_id(2)

    first_row = tile * tuning.block_rows
    rows = first_row + jnp.arange(tuning.block_rows)  # R
    query, head = rows // G, kv_head * G + rows % G
    is_row = rows < T * G
    positions = starts_ref[b] + query
    lanes = jnp.arange(_num_lanes(D))

    # Tokens from `begin` to `end` are all that some row of the tile sees.
    first_query = starts_ref[b] + lax.div(first_row, G)
    last_query = starts_ref[b] + jnp.minimum(lax.div(first_row + tuning.block_rows - 1, G), T - 1)
    begin = jnp.int32(0)
    if options.sliding_window is not None:
        begin = jnp.maximum(first_query + 1 - options.sliding_window, 0)
    end = jnp.maximum(jnp.minimum(contexts_ref[b], last_query + 1), begin)
    kv_tiles = pl.cdiv(end - begin, tuning.block_kv)
    share = pl.cdiv(kv_tiles, tuning.num_splits)

    def load(ref: Any, is_live: Array) -> Array:
        """A tile of lanes; zeros where it is not live and in lanes beyond the head size."""
        mask = is_live[:, None] & (lanes < D)[None, :]
        return triton.load(ref, mask=mask, other=0)

    q = load(q_ref.at[b, query[:, None], head[:, None], lanes[None, :]], is_row)  # [R, D]

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = state
        slots = begin + i * tuning.block_kv + jnp.arange(tuning.block_kv)  # K
        # Table entries and slots beyond the context may hold anything and are never read.
        is_live = slots < end
        blocks = triton.load(tables_ref.at[b, slots // S], mask=is_live, other=0)
        at = (blocks[:, None], kv_head, (slots % S)[:, None], lanes[None, :])
        k, v = load(k_ref.at[at], is_live), load(v_ref.at[at], is_live)  # [K, D]

        is_visible = is_live & (slots <= positions[:, None])  # [R, K]
        if options.sliding_window is not None:
            is_visible &= slots > positions[:, None] - options.sliding_window
        scores = options.scale * _dot(q, k.T)
        if options.soft_cap is not None:
            scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
        scores = jnp.where(is_visible, scores, -jnp.inf)

        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp(top - new_top)
        weights = jnp.exp(scores - new_top[:, None])
        new_total = total * shrink + jnp.sum(weights, axis=1)
        new_out = out * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return new_top, new_total, new_out

    R = tuning.block_rows
    nothing = (
        jnp.full((R,), LOWEST, jnp.float32),
        jnp.zeros((R,), jnp.float32),
        jnp.zeros((R, lanes.size), jnp.float32),
    )
    first = split * share
    top, total, out = lax.fori_loop(first, jnp.minimum(first + share, kv_tiles), step, nothing)
    triton.store(top_ref.at[split, b, query, head], top, mask=is_row)
    triton.store(total_ref.at[split, b, query, head], total, mask=is_row)
    triton.store(
        out_ref.at[split, b, query[:, None], head[:, None], lanes[None, :]],
        out,
        mask=is_row[:, None] & (lanes < D)[None, :],
    )


def _dot(a: Array, b: Array) -> Array:
    """Product in float32; of float32 without rounding its factors to TF32."""
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _num_lanes(head_size: int) -> int:
    """Triton's tiles have powers of two, and its products at least 16."""
    return max(16, pl.next_power_of_2(head_size))


def _pallas_triton() -> Any:
    """`jax.experimental.pallas.triton`; `Unsupported` where this JAX does not carry it."""
    try:
        return importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        raise Unsupported(
            f"this JAX ({jax.__version__}) no longer carries Pallas Triton; "
            "use mosaic_gpu, xla or an older JAX"
        ) from error
