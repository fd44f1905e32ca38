"""A call of paged attention: its options, its shapes and their checks, its result."""

import math
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels.arguments import as_array, as_indices, check_range, check_static
from pallas_kernels.targets import Target

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
        check_static(self, scale="multiply q by it and give scale=1")
        scale = _number("scale", self.scale, float)
        soft_cap, window = self.soft_cap, self.sliding_window
        soft_cap = None if soft_cap is None else _number("soft_cap", soft_cap, float)
        window = None if window is None else _number("sliding_window", window, operator.index)
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")
        if soft_cap is not None and not 0 < soft_cap < math.inf:
            raise ValueError(f"soft_cap must be None or positive and finite, got {soft_cap}")
        if window is not None and not 1 <= window <= MAX_WINDOW:
            raise ValueError(
                f"sliding_window must be None (all tokens) or 1 to {MAX_WINDOW}, got {window}"
            )
        if self.detect_races and not self.interpret:
            raise ValueError("detect_races=True needs interpret=True: the interpreter finds races")
        # Numbers of numpy and of JAX become Python's: they neither promote dtypes nor lack a hash.
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "soft_cap", soft_cap)
        object.__setattr__(self, "sliding_window", window)


def _number[N: (int, float)](name: str, value: Any, kind: Callable[[Any], N]) -> N:
    try:
        if isinstance(value, str | bool):
            raise TypeError
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        wanted = "a number" if kind is float else "an integer"
        raise ValueError(f"{name} must be {wanted}, got {value!r}") from error


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
    lens = as_indices("context_lens", context_lens, "[B]")
    starts = as_indices("query_starts", query_starts, "[B]")
    for name, rows in (("block_tables", tables), ("context_lens", lens), ("query_starts", starts)):
        if len(rows) != len(q):
            raise ValueError(f"{name} has {len(rows)} rows, q has {len(q)}")
    P, _, S, _ = k_cache.shape
    M = tables.shape[1]
    width = f"the tables have {M} blocks of {S} tokens"
    check_range("context_lens", lens, range(M * S + 1), width)
    check_range("query_starts", starts, range(-q.shape[1], M * S + 1), width)
    if isinstance(lens, np.ndarray):
        used = np.arange(M) * S < lens[:, None]
        check_range("block_tables", tables, range(P), f"the caches have {P} blocks", where=used)
    return q, k_cache, v_cache, *map(jnp.asarray, (tables, lens, starts))


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
