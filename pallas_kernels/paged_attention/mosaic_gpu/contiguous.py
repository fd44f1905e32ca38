"""Attention over contiguous caches by the same kernel body: what paging costs is the difference.

Keys and values of a row stand at `[row, head, 0 : context]` of caches `[B, Hk, L, D]`; each
head's part of a tile is one copy.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from pallas_kernels import targets
from pallas_kernels.arguments import as_array
from pallas_kernels.paged_attention.spec import (
    AttentionOptions,
    AttentionResult,
    Call,
    as_rows,
    check_floats,
    nothing_seen,
)
from pallas_kernels.registry import Unsupported

from .api import kernel_of, refused
from .copies import Entries
from .kernel import View
from .products import MmaProducts
from .tiles import Tiles


@dataclass(frozen=True)
class Stretch:
    """A source: a row's tokens in caches `[B, Hk, L, D]`, seen as the matrix `[B * Hk * L, D]`."""

    tiles: Tiles
    length: int  # L
    first_stretch: Array  # row * Hk + first head

    def entries(self, tile: Array) -> Entries:
        return ()

    def starts(self, tile: Array, entries: Entries) -> Sequence[Array]:
        return [
            (self.first_stretch + head) * self.length + tile * self.tiles.tokens
            for head in range(self.tiles.heads)
        ]


def contiguous_attention(
    q: ArrayLike,  # [B, T, Hq, D]
    k: ArrayLike,  # [B, Hk, L, D]
    v: ArrayLike,  # [B, Hk, L, D]
    context_lens: ArrayLike,  # i32[B]
    query_starts: ArrayLike,  # i32[B], position of the row's first query
    *,
    options: AttentionOptions,
    block_size: int = 16,
) -> AttentionResult:
    """Query t of row b, at position query_starts[b] + t, sees what stands at or before it.

    D is 64, 128 or 256. Tiles and splits are those of a paged cache with blocks of `block_size`
    tokens; L must be a multiple of both. ValueError for what does not fit, `Unsupported` for other
    calls.
    """
    q = as_array("q", q, "[B, T, Hq, D]")
    k, v = as_array("k", k, "[B, Hk, L, D]"), as_array("v", v, "[B, Hk, L, D]")
    check_floats(q, k=k, v=v)
    B, T, Hq, D = q.shape
    _, Hk, L, _ = k.shape
    if (len(k), k.shape[3]) != (B, D):
        raise ValueError(f"k {k.shape} must have the {B} rows and the head size {D} of q")
    lens, starts = map(jnp.asarray, as_rows(B, L, context_lens, query_starts))
    if block_size < 1 or L % block_size:
        raise ValueError(f"caches of {L} tokens are no multiple of blocks of {block_size}")
    M = L // block_size
    rows = max(B, 1)  # an empty call is refused, or not, like others
    call = Call(
        rows, max(T, 1), Hq, Hk, D, block_size, rows * M, M, q.dtype, options, targets.current()
    )
    reason = refused(call)
    if reason is None:
        kernel = kernel_of(call, MmaProducts)
        tokens, heads = kernel.tiles.tokens, kernel.tiles.heads
        tiles = dataclasses.replace(kernel.tiles, chunk=tokens, joined=heads == 1)
        kernel = dataclasses.replace(kernel, tiles=tiles)
        reason = kernel.misfit(call)
        if L % tokens:
            reason = f"caches of {L} tokens are no multiple of tiles of {tokens}"
    if reason is not None:
        raise Unsupported(f"contiguous attention cannot do this: {reason}")

    if 0 in (B, T):
        return nothing_seen(q)

    def stretch(row: Array, first_head: Array, view: View) -> Stretch:
        return Stretch(kernel.tiles, L, row * Hk + first_head)

    k, v = (x.reshape(B * Hk * L, D) for x in (k, v))
    return kernel(q, k, v, lens, starts, stretch)
