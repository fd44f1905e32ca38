"""Tiles of keys and values on their way from the cache to shared memory, several at a time.

A source says where the copies of a tile read. It has ``entries(tile)``, scalars that are read from
global memory ahead of the copies that need them, and ``starts(tile, entries)``, the first row of
each copy in the caches, seen as matrices ``[rows, D]``.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_tiles import Tiles

Ref = Any
Entries = tuple[Array, ...]


class Source(Protocol):
    """Where the copies of a tile read."""

    def entries(self, tile: Array) -> Entries: ...
    def starts(self, tile: Array, entries: Entries) -> Sequence[Array]: ...


@dataclass(frozen=True)
class Stages:
    """The tiles in flight and their shared memory, a ring of ``num_stages``."""

    tiles: Tiles
    source: Source
    k: Ref  # global memory, [rows, D]
    v: Ref
    k_smem: Ref  # [stages, rows, D]
    v_smem: Ref
    num_stages: int

    def slot(self, i: Array) -> Array:
        return lax.rem(i, jnp.int32(self.num_stages))

    def copy(
        self, i: Array, first_tile: Array, entries: Entries, copy: Callable[..., None]
    ) -> None:
        """Start the copies of the program's i-th tile."""
        rows = self.tiles.copy_rows
        starts = self.source.starts(first_tile + i, entries)
        for ref, smem in ((self.k, self.k_smem), (self.v, self.v_smem)):
            for j, start in enumerate(starts):
                target = smem.at[self.slot(i), pl.ds(j * rows, rows)]
                copy(ref.at[pl.ds(start, rows)], target)


@dataclass(frozen=True)
class TmaPipeline:
    """Copies by the tensor memory accelerator (sm_90 and later), each tile with a barrier."""

    stages: Stages
    barriers: Ref
    first_tile: Array
    count: Array  # tiles of the program

    def _start(self, i: Array, entries: Entries) -> None:
        barrier = self.barriers.at[self.stages.slot(i)]
        self.stages.copy(
            i,
            self.first_tile,
            entries,
            lambda source, target: plgpu.copy_gmem_to_smem(source, target, barrier),
        )

    def fill(self) -> Entries:
        """Start the first tiles; the entries that `advance` takes first."""
        source, depth = self.stages.source, self.stages.num_stages
        for i in range(depth):
            entries = source.entries(self.first_tile + i)
            pl.when(i < self.count)(functools.partial(self._start, jnp.int32(i), entries))
        return source.entries(self.first_tile + depth)

    def wait(self, i: Array, entries: Entries) -> Entries:
        """Wait for tile i."""
        plgpu.barrier_wait(self.barriers.at[self.stages.slot(i)])
        return entries

    def advance(self, i: Array, entries: Entries) -> Entries:
        """Tile i has been used: start the one that takes its place."""
        plgpu.commit_smem()  # all warps have read the tile, before it is overwritten
        next_tile = i + self.stages.num_stages
        pl.when(next_tile < self.count)(lambda: self._start(next_tile, entries))
        return self.stages.source.entries(self.first_tile + next_tile + 1)

    def drain(self) -> None:
        """Nothing is in flight once the last tile has been waited for."""


def start_cp_async(source: Ref, target: Ref, *, interpret: bool) -> None:
    """Start a copy by cp.async; the interpreter, which has none, copies at once."""
    if interpret:
        target[...] = source[...]
    else:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


@dataclass(frozen=True)
class CpAsyncPipeline:
    """Copies by threads (sm_80 to sm_89), awaited in the order in which they started."""

    stages: Stages
    first_tile: Array
    count: Array
    interpret: bool

    def _start(self, i: Array, entries: Entries) -> None:
        copy = functools.partial(start_cp_async, interpret=self.interpret)
        self.stages.copy(i, self.first_tile, entries, copy)

    def _wait(self, still_in_flight: int) -> None:
        if not self.interpret:
            plgpu.wait_gmem_to_smem(still_in_flight)

    def fill(self) -> Entries:
        """Start the first tiles; the entries that `wait` takes first."""
        source, ahead = self.stages.source, self.stages.num_stages - 1
        for i in range(ahead):
            entries = source.entries(self.first_tile + i)
            pl.when(i < self.count)(functools.partial(self._start, jnp.int32(i), entries))
        return source.entries(self.first_tile + ahead)

    def wait(self, i: Array, entries: Entries) -> Entries:
        """Wait for tile i, and start the one that takes the place of tile i - 1."""
        ahead = self.stages.num_stages - 1
        next_tile = i + ahead
        more = next_tile < self.count

        @pl.when(more)
        def _() -> None:
            self._start(next_tile, entries)
            self._wait(2 * self.stages.tiles.copies * ahead)

        @pl.when(jnp.logical_not(more))
        def _() -> None:
            self._wait(0)

        return self.stages.source.entries(self.first_tile + next_tile + 1)

    def advance(self, i: Array, entries: Entries) -> Entries:
        """The next `wait` overwrites tile i, behind a barrier that comes with the copies."""
        return entries

    def drain(self) -> None:
        self._wait(0)
