"""Moving whole blocks, as the lab checks it; `attention` is the pattern."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.block_copy import IMPLEMENTATIONS, copy_blocks, read_blocks, write_blocks
from pallas_kernels.lab.wanted import Wanted
from pallas_kernels.moves import NULL_BLOCK, MoveOptions

REGISTRY = IMPLEMENTATIONS


@dataclass(frozen=True)
class Spec:
    """One move and shape; `padded` of the moved blocks are the null block."""

    name: str
    move: Literal["copy", "read", "write"] = "copy"
    dtype: str = "bfloat16"
    num_moved: int = 4
    padded: int = 1
    num_caches: int = 2
    num_kv_heads: int = 2
    head_size: int = 128
    block_size: int = 16
    num_blocks: int = 10

    @property
    def shape(self) -> str:
        return (
            f"N{self.num_moved} L{self.num_caches} H{self.num_kv_heads} D{self.head_size} "
            f"S{self.block_size} P{self.num_blocks}"
        )


@dataclass(frozen=True)
class Options(MoveOptions):
    """Which move is called, and how."""

    move: str = "copy"


class BlockCopyCase(NamedTuple):
    """Arguments of the moves, arrays or shapes; each move takes some of them."""

    caches: list[Any]  # L of [P, Hk, S, D]
    staged: Any  # [N, L, Hk, S, D]
    sources: Any  # i32[N]
    targets: Any  # i32[N]


VALUE_SPECS = (
    Spec("copy"),
    Spec("copy one block", num_moved=1, padded=0),
    Spec("copy only padding", num_moved=2, padded=2),
    Spec("copy, three heads", num_kv_heads=3, head_size=64, block_size=4),
    Spec("copy, head size 80, block size 1", head_size=80, block_size=1),
    Spec("copy float16", dtype="float16", num_caches=4),
    Spec("copy float32", dtype="float32"),
    Spec("read", move="read"),
    Spec("read, three heads", move="read", num_kv_heads=3, head_size=64, block_size=4),
    Spec("write", move="write"),
    Spec("write, three heads", move="write", num_kv_heads=3, head_size=64, block_size=4),
)

_LLAMA: dict[str, Any] = {"num_caches": 64, "num_kv_heads": 8, "num_blocks": 16384}
COMPILE_SPECS = (
    Spec("Llama-3-8B copy", num_moved=16, **_LLAMA),
    Spec("Llama-3-8B read", "read", num_moved=64, **_LLAMA),
    Spec("Llama-3-8B write", "write", num_moved=64, **_LLAMA),
    Spec("SmolLM2-135M copy", num_caches=60, num_kv_heads=3, head_size=64, num_blocks=4096),
)


def make(spec: Spec, rng: np.random.Generator) -> BlockCopyCase:
    """Random numbers and blocks; none is both source and target."""
    dtype = jnp.dtype(spec.dtype)
    block = (spec.num_kv_heads, spec.block_size, spec.head_size)
    blocks = 1 + rng.permutation(spec.num_blocks - 1).astype(np.int32)
    sources, targets = blocks[: spec.num_moved], blocks[spec.num_moved : 2 * spec.num_moved]
    sources[: spec.padded] = targets[: spec.padded] = NULL_BLOCK
    caches = rng.standard_normal((spec.num_caches, spec.num_blocks, *block)).astype(dtype)
    staged = rng.standard_normal((spec.num_moved, spec.num_caches, *block)).astype(dtype)
    return BlockCopyCase(list(caches), staged, sources, targets)


def value_options(impl: str, spec: Spec, *, interpret: bool) -> Options:
    """Races are looked for where the kernel is interpreted."""
    return Options(interpret, interpret, spec.move)


def compile_options(spec: Spec) -> Options:
    return Options(move=spec.move)


def arguments(impl: str, case: BlockCopyCase) -> BlockCopyCase:
    return case


def shapes(impl: str, spec: Spec) -> BlockCopyCase:
    """The shapes and dtypes of `arguments`."""
    dtype = jnp.dtype(spec.dtype)
    block = (spec.num_kv_heads, spec.block_size, spec.head_size)
    cache = jax.ShapeDtypeStruct((spec.num_blocks, *block), dtype)
    staged = jax.ShapeDtypeStruct((spec.num_moved, spec.num_caches, *block), dtype)
    blocks = jax.ShapeDtypeStruct((spec.num_moved,), jnp.int32)
    return BlockCopyCase([cache] * spec.num_caches, staged, blocks, blocks)


def function(impl: str, options: Options) -> Callable[..., dict[str, Array]]:
    """The call; it returns results by name, without the null block, which may hold anything."""

    def move(
        caches: list[Array], staged: Array, sources: Array, targets: Array
    ) -> dict[str, Array]:
        interpreter = {"interpret": options.interpret, "detect_races": options.detect_races}
        call: dict[str, Any] = {"impl": impl, **interpreter}
        if options.move == "read":
            return {"staged": read_blocks(caches, sources, **call)}
        if options.move == "copy":
            after = copy_blocks(caches, sources, targets, **call)
        else:
            after = write_blocks(caches, staged, targets, **call)
        return {f"cache {i}": cache[NULL_BLOCK + 1 :] for i, cache in enumerate(after)}

    return move


def wanted(case: BlockCopyCase, options: Options, *, on_gpu: bool) -> dict[str, Wanted]:
    """The results that `function` must return: numbers are moved, so exactly these."""
    caches = [cache.astype(np.float64) for cache in case.caches]
    dtype = case.staged.dtype
    read = np.stack([cache[case.sources] for cache in caches], axis=1)
    if options.move == "read":
        return {"staged": Wanted(read, 0, dtype)}
    moved = read if options.move == "copy" else case.staged
    for i, cache in enumerate(caches):
        cache[case.targets] = moved[:, i]
    return {
        f"cache {i}": Wanted(cache[NULL_BLOCK + 1 :], 0, dtype) for i, cache in enumerate(caches)
    }
