"""Shared by the ops that move keys and values: options, checks, choice of an implementation.

Caches are `[P, Hk, S, D]`: P blocks of S slots for each of Hk KV heads, D the head size. Block 0
is the null block: padding goes there, and nothing reads it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels import targets
from pallas_kernels.arguments import as_array, as_indices, as_static, check_range
from pallas_kernels.registry import Registry, Unsupported
from pallas_kernels.targets import Target

NULL_BLOCK = 0
# The implementation that "auto" stands for: no kernel, as no GPU has been measured yet.
AUTO = "xla"


@dataclass(frozen=True)
class MoveOptions:
    """Static choices of a call.

    interpret: run a Pallas kernel in Pallas' interpreter, which needs no GPU and is slow.
    detect_races: the interpreter also looks for races; it raises or reports what it finds.
    """

    interpret: bool = False
    detect_races: bool = False

    def __post_init__(self) -> None:
        as_static(self, "interpret", bool)
        as_static(self, "detect_races", bool)
        if self.detect_races and not self.interpret:
            raise ValueError("detect_races=True needs interpret=True: the interpreter finds races")


@dataclass(frozen=True)
class MoveCall:
    """A call, as it is known when it is traced; an implementation may refuse it."""

    num_moved: int  # tokens or blocks
    num_caches: int
    cache_shape: tuple[int, ...]  # (P, Hk, S, D) of each
    dtype: jnp.dtype
    options: MoveOptions
    target: Target | None  # the GPU it is traced for; None: no GPU

    @classmethod
    def of(cls, caches: list[Array], indices: Array, options: MoveOptions) -> "MoveCall":
        """The call for caches that are alike; `indices`, `i32[N]`, say what is moved."""
        shape, dtype = caches[0].shape, caches[0].dtype
        return cls(len(indices), len(caches), shape, dtype, options, targets.current())


def resolve_move(registry: Registry, impl: str, call: MoveCall) -> str:
    """The implementation that does the call: `impl`, or what "auto" stands for.

    ValueError for an unknown name, `Unsupported` for one that refuses.
    """
    name = AUTO if impl == "auto" else impl
    refuse = getattr(registry.module(name), "refusal", None)
    if refuse is not None and (reason := refuse(call)):
        raise Unsupported(f"{registry.op} {name!r} cannot do this: {reason}")
    return name


def as_caches(caches: Iterable[ArrayLike]) -> list[Array]:
    """Caches as jax arrays; ValueError unless all are `[P, Hk, S, D]`, alike and not empty."""
    arrays = [as_array("a cache", cache, "[P, Hk, S, D]") for cache in caches]
    if not arrays:
        raise ValueError("no caches are given")
    for cache in arrays:
        if 0 in cache.shape:
            raise ValueError(f"a cache holds no token, its shape is {cache.shape}")
        if (cache.shape, cache.dtype) != (arrays[0].shape, arrays[0].dtype):
            raise ValueError(
                f"caches differ: {arrays[0].dtype}{arrays[0].shape}, {cache.dtype}{cache.shape}"
            )
    return arrays


def as_numbers(name: str, numbers: ArrayLike, stop: int, why: str) -> Array:
    """Numbers of slots or blocks as `i32[N]`; ValueError for other arrays, and as `check_range`."""
    indices = as_indices(name, numbers, "[N]")
    check_range(name, indices, stop, why)
    return jnp.asarray(indices)
