"""Moving blocks in Mosaic GPU: one launch for all layers, a program for a few rows of one block.

A block of a cache is seen as `[Hk * S, D]`, contiguous. The caches are passed as references, so
that the kernel writes into them and no more. Nothing is written to the null block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.derivatives import without_derivatives
from pallas_kernels.mosaic import MOSAIC_GPU, interpreter, load, refusal, row_layout, store
from pallas_kernels.moves import NULL_BLOCK, MoveOptions

__all__ = ["copy", "read", "refusal", "write"]

Caches = list[Array]  # each [P, Hk, S, D]
# Moved by a program: each of its 128 threads has four loads of 16 bytes under way.
PROGRAM_BYTES = 8192


class Program(NamedTuple):
    """A program's share, as the kernel sees it."""

    cache: Array  # which of the caches
    n: Array  # which of the blocks that are moved
    rows: Any  # slice, which rows of the block
    move: Callable[[Any, Any], None]  # (source, target), references to so many rows


def copy(caches: Caches, sources: Array, targets: Array, *, options: MoveOptions) -> Caches:
    """Block targets[n] of each cache holds what sources[n] holds; both i32[N]."""
    caches = list(without_derivatives(MOSAIC_GPU, *caches))

    def body(program: Program, sources_ref: Any, targets_ref: Any, *cache_refs: Any) -> None:
        cache, n, rows, move = program
        source, target = sources_ref[n], targets_ref[n]

        def within(ref: Any) -> None:
            move(ref.at[source, rows], ref.at[target, rows])

        @pl.when(target != NULL_BLOCK)
        def _() -> None:
            lax.switch(cache, [partial(within, ref) for ref in cache_refs])

    refs = _references(caches)
    _launch(body, caches, len(targets), options)(sources, targets, *refs)
    return _contents(refs, caches)


def read(caches: Caches, blocks: Array, *, options: MoveOptions) -> Array:
    """Blocks i32[N] of L caches -> [N, L, Hk, S, D]."""
    caches = list(without_derivatives(MOSAIC_GPU, *caches))

    def body(program: Program, blocks_ref: Any, *refs: Any) -> None:
        cache, n, rows, move = program
        block = blocks_ref[n]
        *cache_refs, staged_ref = refs

        def of(ref: Any) -> None:
            move(ref.at[block, rows], staged_ref.at[n, cache, rows])

        lax.switch(cache, [partial(of, ref) for ref in cache_refs])

    views = [_rows_of_blocks(cache) for cache in caches]
    shape = (len(blocks), len(caches), *views[0].shape[1:])
    staged = jax.ShapeDtypeStruct(shape, caches[0].dtype)
    out = _launch(body, caches, len(blocks), options, out_type=staged)(blocks, *views)
    return out.reshape(*shape[:2], *caches[0].shape[1:])


def write(caches: Caches, staged: Array, blocks: Array, *, options: MoveOptions) -> Caches:
    """Blocks i32[N] of L caches hold staged [N, L, Hk, S, D] afterwards."""
    staged, *caches = without_derivatives(MOSAIC_GPU, staged, *caches)

    def body(program: Program, blocks_ref: Any, staged_ref: Any, *cache_refs: Any) -> None:
        cache, n, rows, move = program
        block = blocks_ref[n]

        def into(ref: Any) -> None:
            move(staged_ref.at[n, cache, rows], ref.at[block, rows])

        @pl.when(block != NULL_BLOCK)
        def _() -> None:
            lax.switch(cache, [partial(into, ref) for ref in cache_refs])

    refs = _references(caches)
    rows = staged.reshape(*staged.shape[:2], *refs[0].shape[1:])
    _launch(body, caches, len(blocks), options)(blocks, rows, *refs)
    return _contents(refs, caches)


def _launch(
    body: Callable[..., None],
    caches: Caches,
    num_blocks: int,
    options: MoveOptions,
    out_type: Any = (),
) -> Callable[..., Any]:
    """The kernel that runs `body(program, *references)` for all rows of the blocks moved."""
    _, Hk, S, D = caches[0].shape
    dtype = caches[0].dtype
    most = max(1, PROGRAM_BYTES // (D * dtype.itemsize))
    num_rows = max(rows for rows in range(1, most + 1) if Hk * S % rows == 0)
    layout = row_layout(num_rows, D, dtype)

    def move(source: Any, target: Any) -> None:
        store(target, load(source, layout))

    def move_blocks(*refs: Any) -> None:
        rows = pl.ds(lax.axis_index("part") * num_rows, num_rows)
        body(Program(lax.axis_index("cache"), lax.axis_index("n"), rows, move), *refs)

    return plgpu.kernel(
        move_blocks,
        out_type=out_type,
        grid=(len(caches), num_blocks, Hk * S // num_rows),
        grid_names=("cache", "n", "part"),
        interpret=interpreter(options.interpret, options.detect_races),
    )


def _rows_of_blocks(cache: Array) -> Array:
    P, Hk, S, D = cache.shape
    return cache.reshape(P, Hk * S, D)


def _references(caches: Caches) -> list[Any]:
    return [jax.new_ref(_rows_of_blocks(cache)) for cache in caches]


def _contents(refs: list[Any], caches: Caches) -> Caches:
    return [ref[...].reshape(cache.shape) for ref, cache in zip(refs, caches, strict=True)]
