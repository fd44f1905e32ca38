"""Attention of the queries of a program to its share of the context, tile by tile.

One warpgroup. Scores are computed transposed, S^T = K Q^T, and so is the output, O^T = V^T P: the
tokens, many, are rows of the products, the queries, few, are columns.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.spec import AttentionOptions
from pallas_kernels.paged_attention.splits import LOWEST

from .products import Products, load
from .tiles import ROW_MULTIPLE, Tiles

Ref = Any
LOG2_E = math.log2(math.e)
PIECE = 64  # lanes of values that are cleared at a time
SMALLEST = 1e-30  # below any sum of weights, the largest of which is 1


def iota(shape: tuple[int, int], axis: int, layout: Any) -> Array:
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), layout)


def store(ref: Ref, x: Array) -> None:
    """Store to global memory, whole lines or not."""
    if hasattr(plgpu, "store"):  # JAX 0.12; before it, plain stores may miss whole lines
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


@dataclass(frozen=True)
class View:
    """What the queries of a program see of the context of their row."""

    first: Array  # the first slot that any column sees, 0 or more
    end: Array  # one past the last, 0 or more
    query_tile: Array  # of the program, among those of its row
    context: Array
    start: Array  # position of the row's first query

    @staticmethod
    def of(
        tiles: Tiles, options: AttentionOptions, query_tile: Array, context: Array, start: Array
    ) -> "View":
        earliest = start + tiles.first_query(query_tile)
        latest = start + tiles.last_query(query_tile)
        end = jnp.maximum(jnp.minimum(context, latest + 1), 0)
        first = jnp.int32(0)
        if options.sliding_window is not None:
            first = jnp.maximum(earliest + 1 - options.sliding_window, 0)
        return View(first, end, query_tile, context, start)


@dataclass(frozen=True)
class Compute:
    """The products and the online softmax of a program."""

    tiles: Tiles
    options: AttentionOptions
    products: Products
    view: View

    def _full(self, shape: tuple[int, ...], value: float) -> Array:
        acc = self.products.acc
        layout = acc if len(shape) == 2 else acc.reduce(0)
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def start(self) -> tuple[Array, Array, Array]:
        """(output^T [D, columns], largest score [columns], sum of weights [rows, columns])."""
        tiles = self.tiles
        return (
            self._full((tiles.head_size, tiles.columns), 0),
            self._full((tiles.columns,), LOWEST),
            self._full((tiles.rows, tiles.columns), 0),
        )

    def _visible(self, first_token: Array) -> Array:
        """Which columns see which rows of a tile, bool[rows, columns]."""
        tiles, view = self.tiles, self.view
        shape = (tiles.rows, tiles.columns)
        row, column = (iota(shape, axis, self.products.acc) for axis in (0, 1))
        token = tiles.row_token(row) + first_token
        position = view.start + tiles.column_query(view.query_tile, column)
        # Rows that no copy writes stand for tokens beyond the tile's.
        end = jnp.minimum(view.context, first_token + tiles.tokens)
        visible = (token < end) & (token <= position)
        if self.options.sliding_window is not None:
            visible &= token > position - self.options.sliding_window
        if tiles.heads > 1:
            visible &= tiles.row_head(row) == tiles.column_head(view.query_tile, column)
        return visible

    def scores(self, queries: Any, k_smem: Ref, first_token: Array) -> Array:
        """Scores in powers of two, f32[rows, columns]; -inf where masked."""
        tiles, options = self.tiles, self.options
        zero = self._full((tiles.rows, tiles.columns), 0)
        scores = self.products.scores(k_smem, queries, zero)
        if options.soft_cap is None:
            scores = scores * (options.scale * LOG2_E)
        else:
            # cap * tanh(x / cap), from one exponential.
            e = jnp.exp2(scores * (2 * LOG2_E * options.scale / options.soft_cap))
            scores = options.soft_cap * LOG2_E * (1 - 2 / (e + 1))
        return jnp.where(self._visible(first_token), scores, -jnp.inf)

    def clear_padding(self, v_smem: Ref) -> None:
        """Put zeros into the rows of all stages' values that no copy writes; before any copy."""
        written = self.tiles.heads * self.tiles.tokens
        if written == self.tiles.rows:
            return
        zeros = jnp.zeros((ROW_MULTIPLE, PIECE), v_smem.dtype)
        for stage in range(v_smem.shape[0]):
            for first_row, piece in self._pieces(v_smem.at[stage]):
                if first_row + ROW_MULTIPLE > written:
                    piece[...] = plgpu.layout_cast(zeros, self.products.lhs)
        if self.products.use_tma:  # which writes beside these stores, not behind them
            plgpu.commit_smem()

    def clear_values(self, v_smem: Ref, first_token: Array) -> None:
        """Put zeros into rows of values that nothing sees: 0 times the NaN they may hold is NaN."""
        tiles, view = self.tiles, self.view
        outside = (first_token + tiles.tokens > view.end) | (first_token < view.first)

        @pl.when(outside)
        def _() -> None:
            layout = self.products.lhs
            row = iota((ROW_MULTIPLE, PIECE), 0, layout)
            for first_row, piece in self._pieces(v_smem):
                token = tiles.row_token(row + first_row) + first_token
                seen = (token >= view.first) & (token < view.end)
                piece[...] = jnp.where(seen, load(piece, layout), jnp.zeros((), piece.dtype))

    def _pieces(self, v_smem: Ref) -> Iterator[tuple[int, Ref]]:
        """Parts of a tile of values, each with its first row; at once they take many registers."""
        for row in range(0, self.tiles.rows, ROW_MULTIPLE):
            for lane in range(0, self.tiles.head_size, PIECE):
                yield row, v_smem.at[pl.ds(row, ROW_MULTIPLE), pl.ds(lane, PIECE)]

    def step(
        self,
        carry: tuple[Array, Array, Array],
        queries: Any,
        k_smem: Ref,
        v_smem: Ref,
        smem: dict[str, Ref],
        first_token: Array,
    ) -> tuple[Array, Array, Array]:
        """Take one tile into the carry."""
        out, top, total = carry
        scores = self.scores(queries, k_smem, first_token)
        self.clear_values(v_smem, first_token)
        new_top = jnp.maximum(top, jnp.max(scores, axis=0))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
        total = total * lax.broadcast_in_dim(shrink, total.shape, [1]) + weights
        out = out * lax.broadcast_in_dim(shrink, out.shape, [1])
        out = self.products.add_values(out, v_smem, weights, smem)
        return out, new_top, total

    def transposable(self, x: Array) -> Array:
        """x [rows or D, columns], laid out so that its transpose can be stored."""
        return plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)

    def strided(self, x: Array) -> Array:
        """x [columns], laid out so that each element can be stored by itself."""
        rows = lax.broadcast_in_dim(x, (ROW_MULTIPLE, self.tiles.columns), [1])
        return jnp.max(self.transposable(plgpu.layout_cast(rows, self.products.acc)), axis=0)

    def finish(self, out: Array, top: Array, total: Array) -> tuple[Array, Array, Array]:
        """(output^T, largest score, log of the sum of exp(score)); `LOWEST` for nothing."""
        total = jnp.sum(total, axis=0)
        scale = 1 / jnp.maximum(total, self._full(total.shape, SMALLEST))
        out = out * lax.broadcast_in_dim(scale, out.shape, [1])
        lse = (top + jnp.log2(total)) * math.log(2)
        return out, top * math.log(2), jnp.maximum(lse, self._full(lse.shape, LOWEST))
