"""The Mosaic GPU kernel: what a program sees, its online softmax, its loop over tiles, the launch.

A program is one warpgroup. Scores are computed transposed, S^T = K Q^T, and so is the output,
O^T = V^T P: the tokens, many, are rows of the products; the queries, few, are columns.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.derivatives import without_derivatives
from pallas_kernels.mosaic import MOSAIC_GPU, interpreter, load, store
from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call
from pallas_kernels.paged_attention.splits import LOWEST, combine_finished
from pallas_kernels.targets import TARGETS, Target

from .copies import CpAsyncPipeline, Source, Stages, TmaPipeline
from .products import Products, swizzled
from .tiles import ROW_MULTIPLE, Tiles

Ref = Any
# (row of the batch, first KV head, view of the context, tables) -> where the copies read
MakeSource = Callable[..., Source]

LOG2_E = math.log2(math.e)
PIECE = 64  # lanes of values that are cleared at a time
SMALLEST = 1e-30  # below any sum of weights, the largest of which is 1
MAX_GRID = 65535  # programs along the axes y and z of a grid
MAX_WIDTH = 512  # the largest that `tiles.quotient` divides by
# A copy by cp.async: 128 threads with 16 bytes each, in two rounds.
CP_ASYNC_ELEMENTS = 2048
# Scratch for each column: enough to reduce all columns across warps at once.
REDUCTION_BYTES = 128


def uses_tma(target: Target | None) -> bool:
    """Whether tiles are copied by the tensor memory accelerator; without a GPU, as on an H200."""
    return (target or TARGETS["H200"]).compute_capability >= (9, 0)


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
class OnlineSoftmax:
    """The products and the online softmax of a program, tile by tile."""

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
        row, column = (_iota(shape, axis, self.products.acc) for axis in (0, 1))
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
        """Put zeros into rows of values that no query sees: they may be NaN, and 0 * NaN is NaN."""
        tiles, view = self.tiles, self.view
        outside = (first_token + tiles.tokens > view.end) | (first_token < view.first)

        @pl.when(outside)
        def _() -> None:
            layout = self.products.lhs
            row = _iota((ROW_MULTIPLE, PIECE), 0, layout)
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


@dataclass(frozen=True)
class Program:
    """One program: its place in the grid and its share of the context."""

    kernel: "Kernel"
    softmax: OnlineSoftmax
    row: Array
    part: Array
    query_tile: Array
    split: Array
    first_tile: Array
    count: Array  # tiles

    @staticmethod
    def here(kernel: "Kernel", products: Products, lens: Any, starts: Any) -> "Program":
        """The program that this is traced in."""
        tiles = kernel.tiles
        names = ("row", "part", "query_tile", "split")
        row, part, query_tile, split = (lax.axis_index(name) for name in names)
        # The last query tile sees most: it starts first.
        query_tile = tiles.query_tiles - 1 - query_tile
        view = View.of(tiles, kernel.options, query_tile, lens[row], starts[row])
        tokens = jnp.int32(tiles.tokens)
        lowest_tile = lax.div(view.first, tokens)
        end_tile = lax.div(view.end + tokens - 1, tokens)
        # Shares are cut from the visible context, not from the table.
        seen = jnp.maximum(end_tile - lowest_tile, 0)
        share = lax.div(seen + kernel.num_splits - 1, jnp.int32(kernel.num_splits))
        first_tile = lowest_tile + split * share
        count = jnp.clip(end_tile - first_tile, 0, share)
        softmax = OnlineSoftmax(tiles, kernel.options, products, view)
        return Program(kernel, softmax, row, part, query_tile, split, first_tile, count)

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        source: Source,
        results: tuple[Any, Any, Any],
        *,
        k_smem: Any,
        v_smem: Any,
        barriers: Any = None,
        **smem: Any,
    ) -> None:
        """Attend to the share, and store what comes out."""
        kernel, softmax, products = self.kernel, self.softmax, self.softmax.products
        caches = (k, v, k_smem, v_smem)
        stages = Stages(
            kernel.tiles, source, *caches, kernel.num_stages, self.first_tile, self.count
        )
        pipeline = (
            TmaPipeline(stages, barriers)
            if kernel.use_tma
            else CpAsyncPipeline(stages, kernel.options.interpret)
        )
        softmax.clear_padding(v_smem)
        own_q = q.at[self.row, self.part, self.query_tile]
        products.fetch_queries(own_q, smem)
        entries = pipeline.fill()
        queries = products.queries(own_q, smem)

        def step(i: Array, carry: Any) -> Any:
            state, slot, entries = carry
            entries = pipeline.wait(i, slot, entries)
            first_token = (self.first_tile + i) * kernel.tiles.tokens
            state = softmax.step(
                state, queries, k_smem.at[slot], v_smem.at[slot], smem, first_token
            )
            return state, stages.next_slot(slot), pipeline.advance(i, slot, entries)

        start = softmax.start(), jnp.int32(0), entries
        state, *_ = lax.fori_loop(0, self.count, step, start)
        pipeline.drain()
        out, top, lse = softmax.finish(*state)
        out_ref, top_ref, lse_ref = (
            ref.at[self.row, self.part, self.query_tile, :, self.split] for ref in results
        )
        store(out_ref.T, softmax.transposable(out.astype(out_ref.dtype)))
        store(top_ref, softmax.strided(top))
        store(lse_ref, softmax.strided(lse))


@dataclass(frozen=True)
class Kernel:
    """All static choices of a kernel."""

    tiles: Tiles
    options: AttentionOptions
    num_stages: int
    num_splits: int
    use_tma: bool
    products: type[Products]

    def misfit(self, call: Call) -> str | None:
        """Why the choices do not fit a call; None if they do."""
        tiles, S = self.tiles, call.block_size
        if call.num_kv_heads % tiles.heads:
            return f"{call.num_kv_heads} KV heads are no multiple of the {tiles.heads} of a program"
        if tiles.tokens % S and S % tiles.tokens:
            return (
                f"of a tile of {tiles.tokens} tokens and a block of {S} neither divides the other"
            )
        if tiles.width > MAX_WIDTH:
            return f"{tiles.width} query heads of a program are more than {MAX_WIDTH}"
        if not self.use_tma:
            if tiles.copy_rows * tiles.head_size % CP_ASYNC_ELEMENTS:
                return (
                    f"without TMA a copy must be a multiple of {CP_ASYNC_ELEMENTS} elements, got "
                    f"{tiles.copy_rows} * {tiles.head_size}"
                )
            queries = tiles.columns * tiles.head_size
            if queries > CP_ASYNC_ELEMENTS and queries % CP_ASYNC_ELEMENTS:
                return (
                    f"without TMA more queries than {CP_ASYNC_ELEMENTS} elements must be a "
                    f"multiple of them, got {tiles.columns} * {tiles.head_size}"
                )
        if call.batch * self.num_splits > MAX_GRID:
            return f"{call.batch} rows in {self.num_splits} splits are more than {MAX_GRID}"
        limit = (call.target or TARGETS["H200"]).shared_memory_per_block
        if (needed := self._shared_memory(call.dtype)) > limit:
            return f"it needs {needed} bytes of shared memory, of which a program has {limit}"
        return None

    def __call__(
        self,
        q: Array,  # [B, T, Hq, D]
        k: Array,  # [rows, D]
        v: Array,  # [rows, D]
        context_lens: Array,  # i32[B]
        query_starts: Array,  # i32[B]
        make_source: MakeSource,
        *tables: Array,  # that the source reads
    ) -> AttentionResult:
        q, k, v = without_derivatives(MOSAIC_GPU, q, k, v)
        columns = self.tiles.to_columns(q)  # [B, parts, query tiles, N, D]
        B, parts, query_tiles, N, D = columns.shape
        products = self._products(q.dtype)
        stats = jax.ShapeDtypeStruct((B, parts, query_tiles, N, self.num_splits), jnp.float32)
        out_dtype = q.dtype if self.num_splits == 1 else jnp.float32

        def body(
            q: Any, k: Any, v: Any, lens: Any, starts: Any, *refs: Any, **scratch: Any
        ) -> None:
            tables, results = refs[:-3], refs[-3:]
            program = Program.here(self, products, lens, starts)
            first_head = program.part * self.tiles.heads
            source = make_source(program.row, first_head, program.softmax.view, *tables)
            program.run(q, k, v, source, results, **scratch)

        out, top, lse = plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct((*stats.shape, D), out_dtype), stats, stats],
            scratch_types=self._scratch(products),
            # The last varies fastest: programs that read the same keys, then neighbouring ones.
            grid=(self.num_splits, B, parts, query_tiles),
            grid_names=("split", "row", "part", "query_tile"),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, reduction_scratch_bytes=REDUCTION_BYTES * N
            ),
            interpret=interpreter(self.options.interpret, self.options.detect_races),
        )(columns, k, v, context_lens, query_starts, *tables)
        result = combine_finished(out, top, lse, q.dtype)
        return AttentionResult(*(self.tiles.from_columns(x) for x in result))

    def _products(self, dtype: Any) -> Products:
        return self.products(self.tiles, dtype, self.use_tma, self.options.interpret)

    def _scratch(self, products: Products) -> dict[str, Any]:
        tiles = self.tiles
        buffer = swizzled((self.num_stages, tiles.rows, tiles.head_size), products.dtype)
        scratch = {"k_smem": buffer, "v_smem": buffer, **products.scratch()}
        if self.use_tma:
            scratch["barriers"] = plgpu.Barrier(
                num_arrivals=2 * tiles.copies, num_barriers=self.num_stages
            )
        return scratch

    def _shared_memory(self, dtype: Any) -> int:
        """Bytes of a program."""
        scratch = self._scratch(self._products(dtype)).values()
        arrays = (x for x in scratch if not isinstance(x, plgpu.Barrier))
        barriers = 8 * (self.num_stages + 1)
        sizes = (math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in arrays)
        return sum(sizes) + barriers + REDUCTION_BYTES * self.tiles.columns


def _iota(shape: tuple[int, int], axis: int, layout: Any) -> Array:
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), layout)
