"""The public entry: choose an implementation by name and call it.

To add one, write a file with `copy`, `read` and `write` of `reference`'s signatures and name
it in `IMPLEMENTATIONS`. A `refusal(call)` of the file, which is optional, says why it cannot do a
`MoveCall`.

All take the caches of keys and of values of all layers, alike and each `[P, Hk, S, D]`, and move
the same blocks of each. Block numbers must name blocks in the caches; pad them with the null block
to keep their count static: it may hold anything afterwards. Donated caches are updated in place.

Arrays are whatever `jnp.asarray` takes, block numbers of any integer type; without any, nothing is
moved. Each raises ValueError for shapes that do not fit, `Unsupported` for what `impl` refuses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels.arguments import as_array
from pallas_kernels.moves import MoveCall, MoveOptions, as_caches, as_numbers, resolve_move
from pallas_kernels.numerics import default_numerics
from pallas_kernels.registry import Registry

IMPLEMENTATIONS = Registry(
    "block_copy",
    {
        "reference": "pallas_kernels.block_copy.reference",
        "xla": "pallas_kernels.block_copy.xla",
        "mosaic_gpu": "pallas_kernels.block_copy.mosaic_gpu",
    },
)


@default_numerics()
def copy_blocks(
    caches: Sequence[ArrayLike],
    sources: ArrayLike,
    targets: ArrayLike,
    *,
    impl: str = "auto",
    interpret: bool = False,
    detect_races: bool = False,
) -> list[Array]:
    """Copy blocks `sources` to blocks `targets`, both `i32[N]`: copy-on-write.

    No block is both source and target, nor target twice, except the null block. Returns the caches.
    """
    caches = as_caches(caches)
    sources = _block_numbers("sources", sources, caches)
    targets = _block_numbers("targets", targets, caches)
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources, but {len(targets)} targets")
    options = MoveOptions(interpret, detect_races)
    copy = _function("copy", impl, caches, targets, options)
    if not len(targets):
        return caches
    copied: list[Array] = copy(caches, sources, targets, options=options)
    return copied


@default_numerics()
def read_blocks(
    caches: Sequence[ArrayLike],
    blocks: ArrayLike,
    *,
    impl: str = "auto",
    interpret: bool = False,
    detect_races: bool = False,
) -> Array:
    """Gather blocks `i32[N]` of L caches into one array `[N, L, Hk, S, D]`: swapping out.

    Each block is contiguous in it, with all layers.
    """
    caches = as_caches(caches)
    blocks = _block_numbers("blocks", blocks, caches)
    options = MoveOptions(interpret, detect_races)
    read = _function("read", impl, caches, blocks, options)
    if not len(blocks):
        return jnp.zeros((0, len(caches), *caches[0].shape[1:]), caches[0].dtype)
    staged: Array = read(caches, blocks, options=options)
    return staged


@default_numerics()
def write_blocks(
    caches: Sequence[ArrayLike],
    staged: ArrayLike,
    blocks: ArrayLike,
    *,
    impl: str = "auto",
    interpret: bool = False,
    detect_races: bool = False,
) -> list[Array]:
    """Scatter `staged`, as from `read_blocks`, to blocks `i32[N]`: swapping in.

    Blocks are distinct except the null block. Returns the caches.
    """
    caches = as_caches(caches)
    blocks = _block_numbers("blocks", blocks, caches)
    staged = as_array("staged", staged, "[N, L, Hk, S, D]")
    expected = (len(blocks), len(caches), *caches[0].shape[1:])
    if staged.shape != expected or staged.dtype != caches[0].dtype:
        raise ValueError(
            f"staged must be {caches[0].dtype}{expected} for {len(blocks)} blocks of "
            f"{len(caches)} caches, got {staged.dtype}{staged.shape}"
        )
    options = MoveOptions(interpret, detect_races)
    write = _function("write", impl, caches, blocks, options)
    if not len(blocks):
        return caches
    written: list[Array] = write(caches, staged, blocks, options=options)
    return written


def _block_numbers(name: str, numbers: ArrayLike, caches: list[Array]) -> Array:
    P = len(caches[0])
    return as_numbers(name, numbers, P, f"the caches have {P} blocks")


def _function(
    function: str, impl: str, caches: list[Array], blocks: Array, options: MoveOptions
) -> Callable[..., Any]:
    name = resolve_move(IMPLEMENTATIONS, impl, MoveCall.of(caches, blocks, options))
    return IMPLEMENTATIONS.function(name, function)
