"""Where the copies of a tile read: blocks that a table names, or one contiguous stretch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.mosaic_pipeline import Entries
from pallas_kernels.paged_attention.mosaic_tiles import Tiles


@dataclass(frozen=True)
class Blocks:
    """Blocks of a paged cache ``[P, Hk, S, D]``, seen as the matrix ``[P * Hk * S, D]``.

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
