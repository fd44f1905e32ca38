"""Writing keys and values into their slots, as the lab checks it; `attention` is the pattern."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.kv_write import IMPLEMENTATIONS, write_kv
from pallas_kernels.lab.wanted import Wanted
from pallas_kernels.moves import NULL_BLOCK, MoveOptions

REGISTRY = IMPLEMENTATIONS


@dataclass(frozen=True)
class Spec:
    """One shape; `padded` of the tokens go to the null block."""

    name: str
    dtype: str = "bfloat16"
    num_tokens: int = 6
    padded: int = 2
    num_kv_heads: int = 8
    head_size: int = 128
    cache_head_size: int = 128
    block_size: int = 16
    num_blocks: int = 4

    @property
    def shape(self) -> str:
        return (
            f"N{self.num_tokens} H{self.num_kv_heads} D{self.head_size}:{self.cache_head_size} "
            f"S{self.block_size} P{self.num_blocks}"
        )


class KVWriteCase(NamedTuple):
    """Arguments of `write_kv`."""

    k_cache: np.ndarray  # [P, Hk, S, cache D]
    v_cache: np.ndarray
    k: np.ndarray  # [N, Hk, D]
    v: np.ndarray
    slots: np.ndarray  # i32[N]


VALUE_SPECS = (
    Spec("tokens of a batch"),
    Spec("one token", num_tokens=1, padded=0),
    Spec("only padding", num_tokens=3, padded=3),
    Spec("one head", num_kv_heads=1),
    Spec("three heads, head size 64", num_kv_heads=3, head_size=64, cache_head_size=64),
    Spec("padded head", head_size=80),
    Spec("head size 80", head_size=80, cache_head_size=80),
    Spec("block size 1", block_size=1, num_blocks=9),
    Spec("float16", dtype="float16"),
    Spec("float32", dtype="float32"),
)

COMPILE_SPECS = (
    Spec("Llama-3-8B decode", num_tokens=64, num_blocks=16384),
    Spec("Llama-3-8B prefill", num_tokens=2048, num_blocks=16384),
    Spec("OPT-13B decode", num_tokens=64, num_kv_heads=40, num_blocks=8192, dtype="float16"),
    Spec("SmolLM2-135M decode", num_tokens=64, num_kv_heads=3, head_size=64, cache_head_size=64),
)


def make(spec: Spec, rng: np.random.Generator) -> KVWriteCase:
    """Random numbers and slots."""
    P, S = spec.num_blocks, spec.block_size
    heads, dtype = spec.num_kv_heads, jnp.dtype(spec.dtype)
    slots = rng.choice(np.arange(S, P * S), spec.num_tokens, replace=False)
    slots[: spec.padded] = rng.integers(0, S, spec.padded)
    cache, new = (P, heads, S, spec.cache_head_size), (spec.num_tokens, heads, spec.head_size)
    k_cache, v_cache, k, v = (
        rng.standard_normal(shape).astype(dtype) for shape in (cache, cache, new, new)
    )
    return KVWriteCase(k_cache, v_cache, k, v, rng.permutation(slots).astype(np.int32))


def value_options(impl: str, spec: Spec, *, interpret: bool) -> MoveOptions:
    """Races are looked for where the kernel is interpreted."""
    return MoveOptions(interpret, interpret)


def compile_options(spec: Spec) -> MoveOptions:
    return MoveOptions()


def arguments(impl: str, case: KVWriteCase) -> tuple[np.ndarray, ...]:
    return case


def shapes(impl: str, spec: Spec) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes and dtypes of `arguments`."""
    dtype, heads, N = jnp.dtype(spec.dtype), spec.num_kv_heads, spec.num_tokens
    block = (heads, spec.block_size, spec.cache_head_size)
    cache = jax.ShapeDtypeStruct((spec.num_blocks, *block), dtype)
    new = jax.ShapeDtypeStruct((N, heads, spec.head_size), dtype)
    return cache, cache, new, new, jax.ShapeDtypeStruct((N,), jnp.int32)


def function(impl: str, options: MoveOptions) -> Callable[..., dict[str, Array]]:
    """The call; it returns results by name, without the null block, which may hold anything."""

    def write(*arguments: Array) -> dict[str, Array]:
        k_cache, v_cache = write_kv(*arguments, impl=impl, **vars(options))
        return {"k": k_cache[NULL_BLOCK + 1 :], "v": v_cache[NULL_BLOCK + 1 :]}

    return write


def wanted(case: KVWriteCase, options: MoveOptions, *, on_gpu: bool) -> dict[str, Wanted]:
    """The results that `function` must return: numbers are moved, so exactly these."""

    def written(cache: np.ndarray, new: np.ndarray) -> Wanted:
        S, D = cache.shape[2], new.shape[2]
        after = cache.astype(np.float64)
        after[case.slots // S, :, case.slots % S] = 0
        after[case.slots // S, :, case.slots % S, :D] = new
        return Wanted(after[NULL_BLOCK + 1 :], 0, cache.dtype)

    return {"k": written(case.k_cache, case.k), "v": written(case.v_cache, case.v)}
