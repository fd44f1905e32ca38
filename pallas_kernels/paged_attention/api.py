"""The public entry: choose an implementation by name and call it.

To add a kernel, write a file with an `attend` of `reference`'s signature and name it in
`IMPLEMENTATIONS`; tests, checks and benchmarks then run on it by that name. Two more functions of
the file are optional: `refusal(call)` says why it cannot do a `Call`, and
`cache_head_size(head_size)` how wide the cache must be for a model's head size.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels import targets
from pallas_kernels.arguments import as_array, as_indices
from pallas_kernels.numerics import default_numerics
from pallas_kernels.paged_attention.spec import (
    AttentionOptions,
    AttentionResult,
    Call,
    as_call,
    nothing_seen,
)
from pallas_kernels.registry import Registry, Unsupported

Attend = Callable[..., AttentionResult]

IMPLEMENTATIONS = Registry(
    "attention",
    {
        "reference": "pallas_kernels.paged_attention.reference",
        "xla": "pallas_kernels.paged_attention.xla",
        "gather_sdpa": "pallas_kernels.paged_attention.gather_sdpa",
        "triton": "pallas_kernels.paged_attention.triton",
        "mosaic_gpu": "pallas_kernels.paged_attention.mosaic_gpu",
        "mosaic_gpu_wgmma": "pallas_kernels.paged_attention.mosaic_gpu.wgmma",
    },
)

# The kernels that "auto" tries on a GPU, in order, before "xla", which does every call.
# "gather_sdpa" is used by name alone until measurements say for which prefills it is the fastest.
AUTO_DECODE = ("mosaic_gpu", "triton")
AUTO_PREFILL = ("mosaic_gpu", "triton")


class Choice(NamedTuple):
    """The implementation that "auto" stands for in a call."""

    impl: str
    refusals: dict[str, str]  # name -> reason, for each kernel that was tried before

    def __str__(self) -> str:
        reasons = "".join(f"; {name}: {reason}" for name, reason in self.refusals.items())
        return f"{self.impl}{reasons}"


def refusal(impl: str, call: Call) -> str | None:
    """Why the implementation cannot do the call; None if it can. ValueError: unknown name."""
    refuse = getattr(IMPLEMENTATIONS.module(impl), "refusal", None)
    return None if refuse is None else refuse(call)


def choose(call: Call, *, widen: bool = False) -> Choice:
    """The implementation that `impl="auto"` picks for a call, and why it picks none before it.

    With `widen` there is no cache yet: the call's head size is the model's, and the cache will be
    as wide as the picked implementation wants it (`cache_head_size`).

    ValueError for a call with tuning parameters, which belong to one implementation.
    """
    if call.options.tuning is not None:
        raise ValueError(
            f"attention 'auto' takes no tuning; name the owner of {call.options.tuning}"
        )
    has_gpu = call.target is not None or call.options.interpret
    refusals: dict[str, str] = {}
    for name in AUTO_DECODE if call.num_queries == 1 else AUTO_PREFILL:
        # Without a GPU no kernel is asked: to import them takes a second.
        reason = _refusal(name, call, widen) if has_gpu else "it needs an NVIDIA GPU"
        if reason is None:
            return Choice(name, refusals)
        refusals[name] = reason
    return Choice("xla", refusals)


def resolve(impl: str, call: Call, *, widen: bool = False) -> str:
    """The implementation that does the call: `impl`, or what "auto" picks; `widen` as in `choose`.

    ValueError for an unknown name, `Unsupported` for one that refuses.
    """
    if impl == "auto":
        return choose(call, widen=widen).impl
    if reason := _refusal(impl, call, widen):
        raise Unsupported(f"attention {impl!r} cannot do this: {reason}")
    return impl


def _refusal(impl: str, call: Call, widen: bool) -> str | None:
    if widen:
        call = dataclasses.replace(call, head_size=cache_head_size(impl, call.head_size))
    return refusal(impl, call)


def cache_head_size(impl: str, head_size: int) -> int:
    """How wide the cache must be for `impl` (not "auto"); lanes past the head size are zero."""
    widen = getattr(IMPLEMENTATIONS.module(impl), "cache_head_size", None)
    return head_size if widen is None else widen(head_size)


@default_numerics()
def paged_prefill_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    block_tables: ArrayLike,
    context_lens: ArrayLike,
    query_starts: ArrayLike,
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    impl: str = "auto",
    interpret: bool = False,
    detect_races: bool = False,
    tuning: Hashable | None = None,
) -> AttentionResult:
    """Causal attention of rows of T queries to what their block tables hold.

    q `[B, T, Hq, D]`; caches `[P, Hk, S, D]`, into which the queries' own keys and values have
    been written; block_tables `i32[B, M]`; context_lens `i32[B]`, the row's tokens in the
    cache, its own queries included; query_starts `i32[B]`, the position of its first query.
    Query t of row b sees positions up to `query_starts[b] + t`, and below `context_lens[b]`.
    The caches may be wider than q (`cache_head_size`): zero in the lanes beyond its head size.

    Table entries beyond the context may hold anything and are never followed; unused slots may
    hold NaN. Softmax statistics are float32. `AttentionOptions` has the options.

    Arrays are whatever `jnp.asarray` takes, indices of any integer type. Without rows, queries or
    table entries the result is that of queries that see nothing. `reference`, `xla` and
    `gather_sdpa` have derivatives. ValueError for what does not fit, `Unsupported` for what `impl`
    refuses.
    """
    q, *others = as_call(q, k_cache, v_cache, block_tables, context_lens, query_starts)
    options = AttentionOptions(scale, soft_cap, sliding_window, interpret, detect_races, tuning)
    B, T, Hq, D = q.shape
    P, Hk, S, cache_D = others[0].shape
    M = others[2].shape[1]
    sizes = (max(B, 1), max(T, 1), Hq, Hk, cache_D, S, P, max(M, 1))  # an empty call is like others
    name = resolve(impl, Call(*sizes, q.dtype, options, targets.current()))
    if 0 in (B, T, M):
        return nothing_seen(q)
    attend: Attend = IMPLEMENTATIONS.function(name, "attend")
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, cache_D - D)))
    result = attend(q, *others, options=options)
    return result._replace(out=result.out[..., :D])


@default_numerics()
def paged_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    block_tables: ArrayLike,
    context_lens: ArrayLike,
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    impl: str = "auto",
    interpret: bool = False,
    detect_races: bool = False,
    tuning: Hashable | None = None,
    return_residuals: bool = False,
) -> Array | tuple[Array, Array, Array]:
    """PagedAttention for decoding (paper section 4.1, equation 4): one query per sequence.

    q `[B, Hq, D]`, at position `context_lens - 1`; the rest as in `paged_prefill_attention`.
    A context of length 0 gives zeros.

    Returns `[B, Hq, D]`; with `return_residuals` also the largest score and the log-sum-exp of
    the scores, both `f32[B, Hq]`.
    """
    q = as_array("q", q, "[B, Hq, D]")
    context_lens = as_indices("context_lens", context_lens, "[B]")
    inputs = (q[:, None], k_cache, v_cache, block_tables, context_lens, context_lens - 1)
    result = paged_prefill_attention(
        *inputs,
        scale=scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
        impl=impl,
        interpret=interpret,
        detect_races=detect_races,
        tuning=tuning,
    )
    out, top, lse = (x[:, 0] for x in result)
    return (out, top, lse) if return_residuals else out
