"""Paged attention as the lab checks it: shapes, calls, and the results that are wanted."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import targets
from pallas_kernels.lab.cases import AttentionCase, Tables, make_case
from pallas_kernels.lab.float64 import attended, bounds
from pallas_kernels.lab.wanted import Wanted
from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    AttentionOptions,
    Call,
    cache_head_size,
    paged_prefill_attention,
    refusal,
)
from pallas_kernels.targets import TARGETS

REGISTRY = IMPLEMENTATIONS


@dataclass(frozen=True)
class Spec:
    """One shape and choice of options. Every case has contexts of 0, 1, a block and the table."""

    name: str
    dtype: str = "bfloat16"
    batch: int = 6
    num_queries: int = 1
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 128
    block_size: int = 16
    max_blocks: int = 10
    tables: Tables = "random"
    queries_anywhere: bool = False  # in their context; False: its last tokens
    # Cores of the GPU that values are tuned for. With few cores, contexts are not split, programs
    # have many tiles, and a pipeline of copies comes round to its first slot.
    num_cores: int = 1
    soft_cap: float | None = None
    sliding_window: int | None = None

    @property
    def shape(self) -> str:
        return (
            f"B{self.batch} T{self.num_queries} H{self.num_heads}/{self.num_kv_heads} "
            f"D{self.head_size} S{self.block_size} M{self.max_blocks}"
        )


# Each takes seconds in the interpreter, so some vary two things.
VALUE_SPECS = (
    Spec("GQA, split", num_cores=132),
    Spec("MHA, shared blocks", num_heads=3, num_kv_heads=3, tables="shared"),
    Spec("MQA, repeated blocks", num_heads=16, num_kv_heads=1, tables="repeated"),
    Spec("float16, permuted table", dtype="float16", tables="permuted"),
    Spec("float32", dtype="float32"),
    Spec("head size 64, soft cap", head_size=64, soft_cap=2.0),
    Spec("head size 80", head_size=80),
    Spec("head size 256", head_size=256, max_blocks=5),
    Spec("block size 1", block_size=1, max_blocks=70),
    Spec("block size 8", block_size=8, max_blocks=17),
    Spec("block size 32", block_size=32, max_blocks=5),
    Spec("block size 256", block_size=256, max_blocks=2, batch=5),
    Spec(
        "window, split",
        batch=4,
        num_heads=4,
        num_kv_heads=1,
        max_blocks=64,
        sliding_window=300,
        num_cores=132,
    ),
    Spec("window and cap", sliding_window=70, soft_cap=30.0, num_heads=4, head_size=64),
    Spec("long context", max_blocks=64, batch=4, num_heads=4, num_kv_heads=1),
    Spec("prefill", num_queries=24, num_heads=4),
    Spec("prefill, window", num_queries=9, num_heads=4, sliding_window=33, queries_anywhere=True),
)

# A grouped-query model, one of the paper's, one with all options; decoding and a prefill chunk.
COMPILE_SPECS = (
    Spec("Llama-3-8B", batch=64, num_heads=32, num_kv_heads=8, max_blocks=256),
    Spec("OPT-13B", "float16", batch=64, num_heads=40, num_kv_heads=40, max_blocks=128),
    Spec("SmolLM2", batch=64, num_heads=9, num_kv_heads=3, head_size=64, max_blocks=256),
    Spec(
        "Gemma-2-9B",
        batch=16,
        num_heads=16,
        num_kv_heads=8,
        head_size=256,
        max_blocks=256,
        soft_cap=50.0,
        sliding_window=4096,
    ),
    Spec("Llama prefill", batch=4, num_queries=512, num_heads=32, num_kv_heads=8, max_blocks=256),
)


def make(spec: Spec, rng: np.random.Generator) -> AttentionCase:
    """Random inputs of a shape, their contexts included."""
    longest = spec.block_size * spec.max_blocks
    edges = [0, 1, spec.block_size, longest]
    contexts = [*edges, *rng.integers(2, longest, spec.batch - len(edges)).tolist()]
    if spec.queries_anywhere:
        starts = [int(rng.integers(0, context + 1)) for context in contexts]
    else:
        starts = [max(0, context - spec.num_queries) for context in contexts]
    order = rng.permutation(spec.batch)
    return make_case(
        rng,
        [contexts[i] for i in order],
        block_size=spec.block_size,
        max_blocks=spec.max_blocks,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        num_queries=spec.num_queries,
        query_starts=[starts[i] for i in order],
        dtype=jnp.dtype(spec.dtype),
        tables=spec.tables,
    )


def value_options(impl: str, spec: Spec, *, interpret: bool) -> AttentionOptions:
    """Races are looked for where the kernel is interpreted; see `Spec.num_cores` for the tuning."""
    options = AttentionOptions(
        spec.head_size**-0.5, spec.soft_cap, spec.sliding_window, interpret, interpret
    )
    q, cache, _, tables, _, _ = shapes(impl, spec)
    (B, T, Hq, _), (P, Hk, S, D), M = q.shape, cache.shape, tables.shape[1]
    call = Call(B, T, Hq, Hk, D, S, P, M, q.dtype, options, targets.current())
    default_tuning = getattr(REGISTRY.module(impl), "default_tuning", None)
    if default_tuning is None or refusal(impl, call):
        return options
    target = call.target or TARGETS["H200"]
    name = f"{target.name} with {spec.num_cores} cores"  # no table knows it
    target = dataclasses.replace(target, name=name, num_cores=spec.num_cores)
    tuning = default_tuning(dataclasses.replace(call, target=target))
    return dataclasses.replace(options, tuning=tuning)


def compile_options(spec: Spec) -> AttentionOptions:
    """The tuning is the kernel's own choice."""
    return AttentionOptions(spec.head_size**-0.5, spec.soft_cap, spec.sliding_window)


def arguments(impl: str, case: AttentionCase) -> tuple[np.ndarray, ...]:
    """A case's arrays, with the cache as wide as the implementation wants it: pad lanes are 0."""
    q, k_cache, v_cache, *rest = case
    pad = cache_head_size(impl, q.shape[-1]) - q.shape[-1]
    k_cache, v_cache = (np.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad))) for x in (k_cache, v_cache))
    return q, k_cache, v_cache, *rest


def shapes(impl: str, spec: Spec) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes and dtypes of `arguments`."""
    B, M = spec.batch, spec.max_blocks
    D = cache_head_size(impl, spec.head_size)
    dtype = jnp.dtype(spec.dtype)
    cache = jax.ShapeDtypeStruct((B * M + 1, spec.num_kv_heads, spec.block_size, D), dtype)
    rows = jax.ShapeDtypeStruct((B,), jnp.int32)
    q = jax.ShapeDtypeStruct((B, spec.num_queries, spec.num_heads, spec.head_size), dtype)
    return q, cache, cache, jax.ShapeDtypeStruct((B, M), jnp.int32), rows, rows


def function(impl: str, options: AttentionOptions) -> Callable[..., dict[str, Array]]:
    """The call, a function of `arguments` that returns the results by name."""

    def attend(*arguments: Array) -> dict[str, Array]:
        return paged_prefill_attention(*arguments, impl=impl, **vars(options))._asdict()

    return attend


def wanted(case: AttentionCase, options: AttentionOptions, *, on_gpu: bool) -> dict[str, Wanted]:
    """The results that `function` must return."""
    result = attended(
        case, scale=options.scale, soft_cap=options.soft_cap, sliding_window=options.sliding_window
    )
    values = np.abs(case.v_cache.astype(np.float64))
    limits = bounds(
        result,
        case.q.dtype,
        largest_value=float(np.max(values, where=np.isfinite(values), initial=0)),
        soft_cap=options.soft_cap,
        on_gpu=on_gpu,
    )
    float32 = np.dtype(np.float32)
    return {
        "out": Wanted(result.out, limits.out, case.q.dtype),
        "max": Wanted(result.max, limits.max, float32),
        "lse": Wanted(result.lse, limits.lse, float32),
    }
