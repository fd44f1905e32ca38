"""Attention over contiguous caches by the same kernel body: what paging costs is the difference.

Keys and values of a row stand at `[row, head, 0 : context]` of caches `[B, Hk, L, D]`; each
head's part of a tile is one copy.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jax import Array

from pallas_kernels import targets
from pallas_kernels.paged_attention.spec import AttentionOptions, AttentionResult, Call
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
    q: Array,  # [B, T, Hq, D]
    k: Array,  # [B, Hk, L, D]
    v: Array,  # [B, Hk, L, D]
    context_lens: Array,  # i32[B]
    query_starts: Array,  # i32[B], position of the row's first query
    *,
    options: AttentionOptions,
    block_size: int = 16,
) -> AttentionResult:
    """Query t of row b, at position query_starts[b] + t, sees what stands at or before it.

    D is 64, 128 or 256. Tiles and splits are those of a paged cache with blocks of `block_size`
    tokens; L must be a multiple of both. `Unsupported` for other calls.
    """
    B, T, Hq, D = q.shape
    _, Hk, L, _ = k.shape
    if L % block_size:
        raise ValueError(f"caches of {L} tokens are no multiple of blocks of {block_size}")
    M = L // block_size
    call = Call(B, T, Hq, Hk, D, block_size, B * M, M, q.dtype, options, targets.current())
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

    def stretch(row: Array, first_head: Array, view: View) -> Stretch:
        return Stretch(kernel.tiles, L, row * Hk + first_head)

    rows = (B * Hk * L, D)
    return kernel(q, k.reshape(rows), v.reshape(rows), context_lens, query_starts, stretch)
