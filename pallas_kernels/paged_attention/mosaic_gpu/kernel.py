"""The Mosaic GPU kernel around the body: programs, shared memory, results that are combined."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call
from pallas_kernels.paged_attention.splits import combine_finished
from pallas_kernels.targets import TARGETS, Target

from .body import Compute, View, store
from .copies import (
    CpAsyncPipeline,
    Source,
    Stages,
    TmaPipeline,
)
from .products import Products, swizzled
from .tiles import Tiles

# (row of the batch, first KV head, what is seen, tables) -> where the copies read
MakeSource = Callable[..., Source]

MAX_GRID = 65535  # programs along the axes y and z of a grid
MAX_WIDTH = 512  # that `mosaic_tiles.quotient` divides
# A copy by cp.async: 128 threads with 16 bytes each, in two rounds.
CP_ASYNC_ELEMENTS = 2048
# For each column: with these, all columns are reduced across warps at once.
REDUCTION_BYTES = 128


def uses_tma(target: Target | None) -> bool:
    """Whether tiles are copied by the tensor memory accelerator; without a GPU, as on an H200."""
    return (target or TARGETS["H200"]).compute_capability >= (9, 0)


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
        columns = self.tiles.to_columns(q)  # [B, parts, query tiles, N, D]
        B, parts, query_tiles, N, D = columns.shape
        products = self._products(q.dtype)
        stats = jax.ShapeDtypeStruct((B, parts, query_tiles, N, self.num_splits), jnp.float32)
        out_dtype = q.dtype if self.num_splits == 1 else jnp.float32
        interpret: Any = False
        if self.options.interpret:
            interpret = plgpu.InterpretGPUParams(detect_races=self.options.detect_races)

        def body(
            q: Any, k: Any, v: Any, lens: Any, starts: Any, *refs: Any, **scratch: Any
        ) -> None:
            tables, results = refs[:-3], refs[-3:]
            program = Program.here(self, products, lens, starts)
            source = program.source(make_source, tables)
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
            interpret=interpret,
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


@dataclass(frozen=True)
class Program:
    """One program: its place in the grid and its share of the context."""

    kernel: Kernel
    compute: Compute
    row: Array
    part: Array
    query_tile: Array
    split: Array
    first_tile: Array
    count: Array  # tiles

    @staticmethod
    def here(kernel: Kernel, products: Products, lens: Any, starts: Any) -> "Program":
        """The program that runs this."""
        tiles = kernel.tiles
        names = ("row", "part", "query_tile", "split")
        row, part, query_tile, split = (lax.axis_index(name) for name in names)
        # What comes last sees most: it starts first.
        query_tile = tiles.query_tiles - 1 - query_tile
        view = View.of(tiles, kernel.options, query_tile, lens[row], starts[row])
        tokens = jnp.int32(tiles.tokens)
        lowest_tile = lax.div(view.first, tokens)
        end_tile = lax.div(view.end + tokens - 1, tokens)
        # Shares are cut from what is seen, not from the table.
        seen = jnp.maximum(end_tile - lowest_tile, 0)
        share = lax.div(seen + kernel.num_splits - 1, jnp.int32(kernel.num_splits))
        first_tile = lowest_tile + split * share
        count = jnp.clip(end_tile - first_tile, 0, share)
        compute = Compute(tiles, kernel.options, products, view)
        return Program(kernel, compute, row, part, query_tile, split, first_tile, count)

    def source(self, make_source: MakeSource, tables: tuple[Any, ...]) -> Source:
        first_head = self.part * self.kernel.tiles.heads
        return make_source(self.row, first_head, self.compute.view, *tables)

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
        kernel, compute, products = self.kernel, self.compute, self.compute.products
        stages = Stages(kernel.tiles, source, k, v, k_smem, v_smem, kernel.num_stages)
        pipeline = (
            TmaPipeline(stages, barriers, self.first_tile, self.count)
            if kernel.use_tma
            else CpAsyncPipeline(stages, self.first_tile, self.count, kernel.options.interpret)
        )
        compute.clear_padding(v_smem)
        own_q = q.at[self.row, self.part, self.query_tile]
        products.fetch_queries(own_q, smem)
        entries = pipeline.fill()
        queries = products.queries(own_q, smem)

        def step(i: Array, carry: Any) -> Any:
            state, slot, entries = carry
            entries = pipeline.wait(i, slot, entries)
            first_token = (self.first_tile + i) * kernel.tiles.tokens
            state = compute.step(
                state, queries, k_smem.at[slot], v_smem.at[slot], smem, first_token
            )
            return state, stages.next_slot(slot), pipeline.advance(i, slot, entries)

        start = compute.start(), jnp.int32(0), entries
        state, *_ = lax.fori_loop(0, self.count, step, start)
        pipeline.drain()
        out, top, lse = compute.finish(*state)
        out_ref, top_ref, lse_ref = (
            ref.at[self.row, self.part, self.query_tile, :, self.split] for ref in results
        )
        store(out_ref.T, compute.transposable(out.astype(out_ref.dtype)))
        store(top_ref, compute.strided(top))
        store(lse_ref, compute.strided(lse))
