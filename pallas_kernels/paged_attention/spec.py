"""A call of paged attention: its options, its shapes and their checks, its result."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels.arguments import as_array, as_indices, as_static, check_range
from pallas_kernels.targets import Target

LARGEST = float(jnp.finfo(jnp.float32).max)
MAX_WINDOW = 2**30  # so that positions less a window are int32


@dataclass(frozen=True)
class AttentionOptions:
    """Static choices of a call.

    scale: factor on the scores q.k, usually head_dim ** -0.5.
    soft_cap: scores become `soft_cap * tanh(score / soft_cap)`; None: off.
    sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None: all.
    interpret: run a Pallas kernel in Pallas' interpreter, which needs no GPU and is slow.
    detect_races: the interpreter also looks for races; it raises or reports what it finds. It can
        for Mosaic GPU kernels alone: in a Triton kernel, copies and barriers are the compiler's.
    tuning: the implementation's own tuning parameters; None: its choice for the device and shape.
    """

    scale: float
    soft_cap: float | None = None
    sliding_window: int | None = None
    interpret: bool = False
    detect_races: bool = False
    tuning: Hashable | None = None

    def __post_init__(self) -> None:
        as_static(self, "scale", float, "multiply q by it and give scale=1")
        as_static(self, "soft_cap", float)
        as_static(self, "sliding_window", int)
        as_static(self, "interpret", bool)
        as_static(self, "detect_races", bool)
        scale, soft_cap, window = self.scale, self.soft_cap, self.sliding_window
        if scale is None or not abs(scale) <= LARGEST:
            raise ValueError(f"scale must be a finite float32, got {scale}")
        if soft_cap is not None and not 0 < soft_cap <= LARGEST:
            raise ValueError(f"soft_cap must be None or a positive float32, got {soft_cap}")
        if window is not None and not 1 <= window <= MAX_WINDOW:
            raise ValueError(
                f"sliding_window must be None (all tokens) or 1 to {MAX_WINDOW}, got {window}"
            )
        if self.detect_races and not self.interpret:
            raise ValueError("detect_races=True needs interpret=True: the interpreter finds races")


@dataclass(frozen=True)
class Call:
    """A call, as it is known when it is traced; an implementation may refuse it.

    q `[B, T, Hq, D]`, caches `[P, Hk, S, D]`, block_tables `[B, M]`.
    """

    batch: int  # B
    num_queries: int  # T
    num_heads: int  # Hq
    num_kv_heads: int  # Hk
    head_size: int  # D, of the cache
    block_size: int  # S
    num_blocks: int  # P
    max_blocks: int  # M
    dtype: jnp.dtype
    options: AttentionOptions
    target: Target | None  # the GPU it is traced for; None: no GPU


class AttentionResult(NamedTuple):
    """Attention and its softmax statistics, so that partial results can be combined.

    A row that sees no key has output 0, max -inf and log-sum-exp -inf.
    """

    out: Array  # [B, T, Hq, D], dtype of q
    max: Array  # f32[B, T, Hq], the largest score
    lse: Array  # f32[B, T, Hq], log of the sum of exp(score)


def nothing_seen(q: Array) -> AttentionResult:
    """The result of queries `[B, T, Hq, D]` that see no key."""
    nothing = jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    return AttentionResult(jnp.zeros_like(q), nothing, nothing)


def as_call(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    block_tables: ArrayLike,
    context_lens: ArrayLike,
    query_starts: ArrayLike,
) -> tuple[Array, ...]:
    """The arrays of a call, as implementations take them.

    q `[B, T, Hq, D]`, caches `[P, Hk, S, D or wider]`, block_tables `i32[B, M]`, context_lens
    and query_starts `i32[B]`. ValueError for what no implementation takes, and for contexts and
    table entries out of range where the host knows them.
    """
    q = as_array("q", q, "[B, T, Hq, D]")
    k_cache = as_array("k_cache", k_cache, "[P, Hk, S, D]")
    v_cache = as_array("v_cache", v_cache, "[P, Hk, S, D]")
    check_floats(q, k_cache=k_cache, v_cache=v_cache)
    if k_cache.shape[3] < q.shape[3]:
        raise ValueError(f"q has head size {q.shape[3]}, the cache only {k_cache.shape[3]}")
    tables = as_indices("block_tables", block_tables, "[B, M]")
    B = len(q)
    P, _, S, _ = k_cache.shape
    M = tables.shape[1]
    if not P:
        raise ValueError(f"k_cache has no blocks, its shape is {k_cache.shape}")
    if len(tables) != B:
        raise ValueError(f"block_tables has {len(tables)} rows, q has {B}")
    lens, starts = as_rows(B, M * S, context_lens, query_starts)
    if isinstance(lens, np.ndarray):
        used = np.arange(M) * S < lens[:, None]
        check_range("block_tables", tables, P, f"the caches have {P} blocks", where=used)
    return q, k_cache, v_cache, *map(jnp.asarray, (tables, lens, starts))


def as_rows(
    B: int, tokens: int, context_lens: ArrayLike, query_starts: ArrayLike
) -> list[Array | np.ndarray]:
    """context_lens and query_starts as `i32[B]`, of rows with room for so many tokens.

    ValueError for others, and for values out of range where the host knows them.
    """
    rows: list[Array | np.ndarray] = []
    padding = -(2**31)  # rows of padding may begin before position 0
    for name, x, least in (
        ("context_lens", context_lens, 0),
        ("query_starts", query_starts, padding),
    ):
        indices = as_indices(name, x, "[B]")
        if len(indices) != B:
            raise ValueError(f"{name} has {len(indices)} rows, q has {B}")
        room = f"a row has room for {tokens} tokens"
        check_range(name, indices, tokens + 1, room, least=least)
        rows.append(indices)
    return rows


def check_floats(q: Array, **caches: Array) -> None:
    """ValueError unless queries fit keys and values: their dtypes, shapes and heads.

    q `[B, T, Hq, D]`; caches: keys and values by their names in the call, `[*, Hk, *, D]`.
    """
    (k_name, k), (v_name, v) = caches.items()
    if k.shape != v.shape:
        raise ValueError(f"{k_name} {k.shape} and {v_name} {v.shape} differ in shape")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, {k_name} and {v_name} differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, {k_name} and {v_name} must be floating point, got {q.dtype}")
    if 0 in k.shape[1:] or 0 in q.shape[2:]:
        raise ValueError(f"no heads, tokens or lanes to attend to: q {q.shape}, {k_name} {k.shape}")
    if q.shape[2] % k.shape[1]:
        raise ValueError(f"{q.shape[2]} query heads are not a multiple of {k.shape[1]} KV heads")
