"""The Mosaic GPU kernel around the body: programs, shared memory, copies, partial results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_body import Compute, View, load, store
from pallas_kernels.paged_attention.mosaic_pipeline import (
    CpAsyncPipeline,
    Source,
    Stages,
    TmaPipeline,
)
from pallas_kernels.paged_attention.mosaic_tiles import Tiles
from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult
from pallas_kernels.paged_attention.splits import combine_finished

# (tables, row of the batch, first KV head, what is seen) -> where the copies read
MakeSource = Callable[[Any, Array, Array, View], Source]
SWIZZLE = 128  # bytes: a line of a tile in shared memory


@dataclass(frozen=True)
class Kernel:
    """All static choices of a kernel."""

    tiles: Tiles
    options: AttentionOptions
    num_stages: int
    num_splits: int
    use_tma: bool

    def __call__(
        self,
        q: Array,  # [B, T, Hq, D]
        k: Array,  # [rows, D]
        v: Array,  # [rows, D]
        tables: Array,  # i32[B, M]
        context_lens: Array,  # i32[B]
        query_starts: Array,  # i32[B]
        make_source: MakeSource,
    ) -> AttentionResult:
        tiles, dtype = self.tiles, q.dtype
        columns = tiles.to_columns(q)  # [B, parts, query tiles, N, D]
        B, parts, query_tiles, N, D = columns.shape
        stats = (B, parts, query_tiles, N, self.num_splits)
        out_dtype = dtype if self.num_splits == 1 else jnp.float32
        transforms = (
            plgpu.TilingTransform((8, SWIZZLE // dtype.itemsize)),  # type: ignore[abstract]
            plgpu.SwizzleTransform(SWIZZLE),  # type: ignore[abstract]
        )
        buffer = plgpu.SMEM((self.num_stages, tiles.rows, D), dtype, transforms=transforms)
        scratch: dict[str, Any] = {
            "k_smem": buffer,
            "v_smem": buffer,
            "p_smem": plgpu.SMEM((tiles.rows, N), dtype),
        }
        if self.use_tma:
            scratch["barriers"] = plgpu.Barrier(
                num_arrivals=2 * tiles.copies, num_barriers=self.num_stages
            )
        interpret: Any = False
        if self.options.interpret:
            interpret = plgpu.InterpretGPUParams(detect_races=self.options.detect_races)

        def body(*refs: Any, **scratch: Any) -> None:
            self._program(make_source, dtype, *refs, **scratch)

        out, top, lse = plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct((*stats, D), out_dtype),
                jax.ShapeDtypeStruct(stats, jnp.float32),
                jax.ShapeDtypeStruct(stats, jnp.float32),
            ],
            scratch_types=scratch,
            grid=(B, parts, query_tiles, self.num_splits),
            grid_names=("row", "part", "query_tile", "split"),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
        )(columns, k, v, tables, context_lens, query_starts)

        return AttentionResult(
            *(tiles.from_columns(x) for x in combine_finished(out, top, lse, dtype))
        )

    def _program(
        self,
        make_source: MakeSource,
        dtype: Any,
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        tables_ref: Any,
        lens_ref: Any,
        starts_ref: Any,
        out_ref: Any,
        top_ref: Any,
        lse_ref: Any,
        *,
        k_smem: Any,
        v_smem: Any,
        p_smem: Any,
        barriers: Any = None,
    ) -> None:
        tiles = self.tiles
        row, part, query_tile, split = (
            lax.axis_index(name) for name in ("row", "part", "query_tile", "split")
        )
        view = View.of(tiles, self.options, query_tile, lens_ref[row], starts_ref[row])
        tokens = jnp.int32(tiles.tokens)
        lowest_tile = lax.div(view.first, tokens)
        end_tile = lax.div(view.end + tokens - 1, tokens)
        # Shares are cut from what is seen, not from the table.
        share = lax.div(
            jnp.maximum(end_tile - lowest_tile, 0) + self.num_splits - 1,
            jnp.int32(self.num_splits),
        )
        first_tile = lowest_tile + split * share
        count = jnp.clip(end_tile - first_tile, 0, share)

        source = make_source(tables_ref, row, part * tiles.heads, view)
        stages = Stages(tiles, source, k_ref, v_ref, k_smem, v_smem, self.num_stages)
        pipeline = (
            TmaPipeline(stages, barriers, first_tile, count)
            if self.use_tma
            else CpAsyncPipeline(stages, first_tile, count)
        )
        compute = Compute(tiles, self.options, dtype, view)
        entries = pipeline.fill()
        compute.clear_padding(v_smem)
        q = load(q_ref.at[row, part, query_tile].T, compute._rhs)

        def step(i: Array, carry: Any) -> Any:
            state, entries = carry
            entries = pipeline.wait(i, entries)
            slot = stages.slot(i)
            state = compute.step(
                state, q, k_smem.at[slot], v_smem.at[slot], p_smem, (first_tile + i) * tokens
            )
            return state, pipeline.advance(i, entries)

        (out, top, total), _ = lax.fori_loop(0, count, step, (compute.start(), entries))
        pipeline.drain()
        out, top, lse = compute.finish(out, top, total)
        at = (row, part, query_tile, slice(None), split)
        store(out_ref.at[at].T, compute.transposable(out.astype(out_ref.dtype)))
        store(top_ref.at[at], compute.strided(top))
        store(lse_ref.at[at], compute.strided(lse))
