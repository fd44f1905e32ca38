"""Tiles of keys and values on their way from the cache to shared memory, several at a time.

A source says where the copies of a tile read. A pipeline starts them, and waits for them.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .tiles import Tiles

Ref = Any
Entries = tuple[Array, ...]


class Source(Protocol):
    """Where the copies of a tile read in the caches, which are seen as matrices `[rows, D]`."""

    def entries(self, tile: Array) -> Entries:
        """Scalars that are read from global memory ahead of the copies that need them."""

    def starts(self, tile: Array, entries: Entries) -> Sequence[Array]:
        """The first row of each copy."""


@dataclass(frozen=True)
class Blocks:
    """A source: blocks of a paged cache `[P, Hk, S, D]`, seen as the matrix `[P * Hk * S, D]`.

    Columns of the table outside of [first_column, last_column] are not read, and no entry is
    followed out of the cache.
    """

    tiles: Tiles
    num_blocks: int  # P
    num_kv_heads: int  # Hk
    block_size: int  # S
    tables: Any  # i32[B, M], in global memory
    row: Array
    first_head: Array
    first_column: Array
    last_column: Array

    def entries(self, tile: Array) -> Entries:
        first = lax.div(tile * self.tiles.tokens, jnp.int32(self.block_size))
        blocks = max(1, self.tiles.tokens // self.block_size)
        columns = (jnp.clip(first + j, self.first_column, self.last_column) for j in range(blocks))
        return tuple(self.tables[self.row, column] for column in columns)

    def starts(self, tile: Array, entries: Entries) -> Sequence[Array]:
        offset = lax.rem(tile * self.tiles.tokens, jnp.int32(self.block_size))
        heads = 1 if self.tiles.joined else self.tiles.heads
        # Clamped only here, lest the loop wait for the entries when it reads them ahead.
        blocks = (jnp.clip(entry, 0, self.num_blocks - 1) for entry in entries)
        return [
            (block * self.num_kv_heads + self.first_head + head) * self.block_size + offset
            for block in blocks
            for head in range(heads)
        ]


@dataclass(frozen=True)
class Stages:
    """A program's tiles on their way, and their shared memory: a ring of `num_stages` slots.

    Tile i is the program's i-th; each fills one slot.
    """

    tiles: Tiles
    source: Source
    k: Ref  # global memory, [rows, D]
    v: Ref
    k_smem: Ref  # [stages, rows, D]
    v_smem: Ref
    num_stages: int
    first_tile: Array  # tile 0, among those of the context
    count: Array  # tiles of the program

    def next_slot(self, slot: Array) -> Array:
        return jnp.where(slot == self.num_stages - 1, 0, slot + 1)

    def previous_slot(self, slot: Array) -> Array:
        return jnp.where(slot == 0, self.num_stages - 1, slot - 1)

    def entries(self, i: Array) -> Entries:
        """The entries of tile i."""
        return self.source.entries(self.first_tile + i)

    def copy(self, i: Array, slot: Array, entries: Entries, copy: Callable[..., None]) -> None:
        """Start the copies of tile i to a slot of the ring."""
        rows = self.tiles.copy_rows
        starts = self.source.starts(self.first_tile + i, entries)
        for ref, smem in ((self.k, self.k_smem), (self.v, self.v_smem)):
            for j, start in enumerate(starts):
                target = smem.at[slot, pl.ds(j * rows, rows)]
                copy(ref.at[pl.ds(start, rows)], target)

    def fill(self, depth: int, start: Callable[..., None]) -> Entries:
        """Start the first `depth` tiles by `start(i, slot, entries)`; the next tile's entries."""
        for i in map(jnp.int32, range(depth)):
            entries = self.entries(i)
            pl.when(i < self.count)(functools.partial(start, i, i, entries))
        return self.entries(jnp.int32(depth))


@dataclass(frozen=True)
class TmaPipeline:
    """Copies by the tensor memory accelerator (sm_90 and later), each slot with a barrier."""

    stages: Stages
    barriers: Ref

    def _start(self, i: Array, slot: Array, entries: Entries) -> None:
        copy = functools.partial(plgpu.copy_gmem_to_smem, barrier=self.barriers.at[slot])
        self.stages.copy(i, slot, entries, copy)

    def fill(self) -> Entries:
        """Start the first tiles; returns the entries that `advance` takes first."""
        return self.stages.fill(self.stages.num_stages, self._start)

    def wait(self, i: Array, slot: Array, entries: Entries) -> Entries:
        """Wait for tile i."""
        plgpu.barrier_wait(self.barriers.at[slot])
        return entries

    def advance(self, i: Array, slot: Array, entries: Entries) -> Entries:
        """Tile i has been used: start the tile that takes its place."""
        plgpu.commit_smem()  # all warps have read the tile, before it is overwritten
        next_tile = i + self.stages.num_stages
        pl.when(next_tile < self.stages.count)(lambda: self._start(next_tile, slot, entries))
        return self.stages.entries(next_tile + 1)

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
    interpret: bool

    def _start(self, i: Array, slot: Array, entries: Entries) -> None:
        copy = functools.partial(start_cp_async, interpret=self.interpret)
        self.stages.copy(i, slot, entries, copy)

    def _wait(self, still_in_flight: int) -> None:
        if not self.interpret:
            plgpu.wait_gmem_to_smem(still_in_flight)

    def fill(self) -> Entries:
        """Start the first tiles; returns the entries that `wait` takes first."""
        return self.stages.fill(self.stages.num_stages - 1, self._start)

    def wait(self, i: Array, slot: Array, entries: Entries) -> Entries:
        """Wait for tile i, and start the tile that takes the place of tile i - 1."""
        stages = self.stages
        ahead = stages.num_stages - 1
        next_tile = i + ahead
        more = next_tile < stages.count

        @pl.when(more)
        def _() -> None:
            self._start(next_tile, stages.previous_slot(slot), entries)
            self._wait(2 * stages.tiles.copies * ahead)

        @pl.when(jnp.logical_not(more))
        def _() -> None:
            self._wait(0)

        return stages.entries(next_tile + 1)

    def advance(self, i: Array, slot: Array, entries: Entries) -> Entries:
        """The next `wait` overwrites tile i, behind a barrier that comes with the copies."""
        return entries

    def drain(self) -> None:
        self._wait(0)
