"""The two matrix products of attention to a tile, transposed: S^T = K Q^T and O^T += V^T P.

The tokens, many, are rows of the products; the queries, few, are columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import load

from .copies import start_cp_async
from .tiles import Tiles

Ref = Any
SWIZZLE = 128  # bytes: a line of a tile in shared memory
# Queries that are kept in registers, in elements: 16 registers of every thread.
REGISTER_QUERIES = 2048


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that copies fill and products read without bank conflicts."""
    transforms = (
        plgpu.TilingTransform((8, SWIZZLE // dtype.itemsize)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(SWIZZLE),  # type: ignore[abstract]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


@dataclass(frozen=True)
class MmaProducts:
    """The products by mma.sync, which every generation has: operands pass through registers.

    Keys and values are read from shared memory once, each row by one warp; queries and weights by
    every warp.
    """

    tiles: Tiles
    dtype: Any
    use_tma: bool
    interpret: bool

    @property
    def acc(self) -> Any:
        return plgpu.Layout.MMA_ACC(self.dtype)

    @property
    def lhs(self) -> Any:
        return plgpu.Layout.MMA_LHS(self.dtype)

    @property
    def _rhs(self) -> Any:
        return plgpu.Layout.MMA_RHS(self.dtype)

    @property
    def _stages_queries(self) -> bool:
        return self.tiles.columns * self.tiles.head_size > REGISTER_QUERIES

    def scratch(self) -> dict[str, Any]:
        """Shared memory for queries, where they are many, and weights."""
        tiles = self.tiles
        scratch: dict[str, Any] = {"weights": plgpu.SMEM((tiles.rows, tiles.columns), self.dtype)}
        if self._stages_queries:
            scratch["queries"] = swizzled((tiles.columns, tiles.head_size), self.dtype)
            if self.use_tma:
                scratch["queries_barrier"] = plgpu.Barrier()
        return scratch

    def fetch_queries(self, q: Ref, smem: dict[str, Ref]) -> None:
        """Start to copy the queries [columns, D] from global memory, before any tile."""
        if not self._stages_queries:
            return
        if self.use_tma:
            plgpu.copy_gmem_to_smem(q, smem["queries"], smem["queries_barrier"])
        else:
            start_cp_async(q, smem["queries"], interpret=self.interpret)

    def queries(self, q: Ref, smem: dict[str, Ref]) -> Callable[[], Array]:
        """queries^T as `scores` takes them, once their copy has arrived."""
        if not self._stages_queries:
            held = load(q.T, self._rhs)
            return lambda: held
        if self.use_tma:
            plgpu.barrier_wait(smem["queries_barrier"])
        return lambda: load(smem["queries"].T, self._rhs)

    def scores(self, k: Ref, queries: Callable[[], Array], zero: Array) -> Array:
        """k [rows, D] -> f32[rows, columns]."""
        return self._mma(zero, load(k, self.lhs), queries())

    def add_values(self, out: Array, v: Ref, weights: Array, smem: dict[str, Ref]) -> Array:
        """out f32[D, columns], v [rows, D], weights f32[rows, columns] -> f32[D, columns]."""
        smem["weights"][...] = weights.astype(self.dtype)
        return self._mma(out, load(v.T, self.lhs), load(smem["weights"], self._rhs))

    def _mma(self, acc: Array, a: Array, b: Array) -> Array:
        if self.interpret:  # the interpreter has no mma
            return acc + jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32))
        return plgpu.mma(acc, a, b)


@dataclass(frozen=True)
class WgmmaProducts:
    """The products by wgmma, of sm_90 alone: a warpgroup's, with operands in shared memory."""

    tiles: Tiles
    dtype: Any
    use_tma: bool
    interpret: bool

    @property
    def acc(self) -> Any:
        return plgpu.Layout.WGMMA

    @property
    def lhs(self) -> Any:
        return plgpu.Layout.WGMMA

    def scratch(self) -> dict[str, Any]:
        """Shared memory for queries and weights^T."""
        tiles = self.tiles
        return {
            "weights": swizzled((tiles.columns, tiles.rows), self.dtype),
            "queries": swizzled((tiles.columns, tiles.head_size), self.dtype),
            "queries_barrier": plgpu.Barrier(),
        }

    def fetch_queries(self, q: Ref, smem: dict[str, Ref]) -> None:
        """Start to copy the queries [columns, D] from global memory."""
        plgpu.copy_gmem_to_smem(q, smem["queries"], smem["queries_barrier"])

    def queries(self, q: Ref, smem: dict[str, Ref]) -> Ref:
        """queries^T as `scores` takes them, once their copy has arrived."""
        plgpu.barrier_wait(smem["queries_barrier"])
        return smem["queries"].T

    def scores(self, k: Ref, queries: Ref, zero: Array) -> Array:
        """k [rows, D] -> f32[rows, columns]."""
        return self._wgmma(k, queries)

    def add_values(self, out: Array, v: Ref, weights: Array, smem: dict[str, Ref]) -> Array:
        """out f32[D, columns], v [rows, D], weights f32[rows, columns] -> f32[D, columns]."""
        smem["weights"].T[...] = weights.astype(self.dtype)
        plgpu.commit_smem()
        return out + self._wgmma(v.T, smem["weights"].T)

    def _wgmma(self, a: Ref, b: Ref) -> Array:
        def product(acc: Any) -> Array:
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(
            product, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32)
        )


Products = MmaProducts | WgmmaProducts
