"""Shared by the ops that move keys and values: options, checks, choice of an implementation.

Caches are `[P, Hk, S, D]`: P blocks of S slots for each of Hk KV heads, D the head size. Block 0
is the null block: padding goes there, and nothing reads it.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from pallas_kernels import targets
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


def check_caches(caches: list[Array]) -> None:
    """Raise ValueError unless all caches are alike, with axes [P, Hk, S, D]."""
    if not caches:
        raise ValueError("no caches are given")
    for cache in caches:
        if cache.ndim != 4:
            raise ValueError(f"a cache must have 4 axes [P, Hk, S, D], got shape {cache.shape}")
        if (cache.shape, cache.dtype) != (caches[0].shape, caches[0].dtype):
            raise ValueError(
                f"caches differ: {caches[0].dtype}{caches[0].shape}, {cache.dtype}{cache.shape}"
            )


def check_indices(name: str, indices: Array) -> None:
    """Raise ValueError unless the indices are `i32[N]`, one or more."""
    if indices.ndim != 1 or indices.dtype != jnp.int32 or not len(indices):
        raise ValueError(
            f"{name} must be int32[N] with N of at least 1, got {indices.dtype}{indices.shape}"
        )
