"""A call of paged attention: its options, its shapes and their checks, its result."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.targets import Target


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
        if not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite, got {self.scale}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap must be None or positive, got {self.soft_cap}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be None or >= 1, got {self.sliding_window}")


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


def check_call(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    context_lens: Array,
    query_starts: Array,
) -> None:
    """Raise ValueError for shapes or dtypes that no implementation takes.

    q `[B, T, Hq, D]`, caches `[P, Hk, S, D or wider]`, block_tables `i32[B, M]`, context_lens
    and query_starts `i32[B]`.
    """
    shapes = {
        "q": (q, 4),
        "k_cache": (k_cache, 4),
        "v_cache": (v_cache, 4),
        "block_tables": (block_tables, 2),
        "context_lens": (context_lens, 1),
        "query_starts": (query_starts, 1),
    }
    for name, (array, rank) in shapes.items():
        if array.ndim != rank:
            raise ValueError(f"{name} must have {rank} axes, got shape {array.shape}")
    for name in ("block_tables", "context_lens", "query_starts"):
        if shapes[name][0].dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {shapes[name][0].dtype}")
    if k_cache.shape != v_cache.shape:
        raise ValueError(f"k_cache {k_cache.shape} and v_cache {v_cache.shape} differ in shape")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(
            f"q, k_cache and v_cache differ in dtype: {q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        )
    B, _, Hq, D = q.shape
    _, Hk, _, cache_head_size = k_cache.shape
    if cache_head_size < D:
        raise ValueError(f"q has head size {D}, the cache only {cache_head_size}")
    if Hq % Hk:
        raise ValueError(f"{Hq} query heads are not a multiple of {Hk} KV heads")
    for name in ("block_tables", "context_lens", "query_starts"):
        if shapes[name][0].shape[0] != B:
            raise ValueError(f"{name} has {shapes[name][0].shape[0]} rows, q has {B}")
