"""How a kernel cuts caches into tiles, and queries into the columns of a matrix product.

A program of a kernel takes one row of the batch, a few neighbouring KV heads and a share of the
context. It fetches keys and values in tiles: ``tokens`` tokens of ``heads`` heads, one token of one
head in a row of the tile. A block of neighbouring heads is contiguous in the cache, so that one
copy fetches a block for all heads of the program. All queries of these heads, padded to
``columns``, meet all rows of a tile in one product; what belongs to different heads is masked. As
a product needs at least 8 columns, heads that fill them cost nothing, and save copies.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

# A product takes rows of the tile 64 at a time, 16 to a warp.
ROW_MULTIPLE = 64
COLUMN_MULTIPLE = 8


@dataclass(frozen=True)
class Tiles:
    """The geometry of a kernel: all static."""

    heads: int  # KV heads of a program
    group: int  # query heads per KV head
    num_queries: int  # T, queries of a row of the batch
    columns: int  # of a program
    tokens: int  # of a tile
    chunk: int  # tokens that are contiguous in the cache, at most `tokens`
    head_size: int
    joined: bool  # a chunk of all heads of the program is one stretch of the cache

    @property
    def rows(self) -> int:
        """Rows of a tile in shared memory, those that no copy writes included."""
        return -(-self.heads * self.tokens // ROW_MULTIPLE) * ROW_MULTIPLE

    @property
    def copies(self) -> int:
        """Copies that fetch a tile of keys, or one of values."""
        return self.tokens // self.chunk * (1 if self.joined else self.heads)

    @property
    def copy_rows(self) -> int:
        return self.chunk * (self.heads if self.joined else 1)

    @property
    def query_tiles(self) -> int:
        """Programs that share the queries of one row of the batch and the same KV heads."""
        return -(-self.num_queries * self.heads * self.group // self.columns)

    def row_head(self, row: Array) -> Array:
        """The head, of the program's, in a row of the tile."""
        return lax.rem(lax.div(row, jnp.int32(self.chunk)), jnp.int32(self.heads))

    def row_token(self, row: Array) -> Array:
        """The token, of the tile's, in a row; `tokens` or more where no copy writes."""
        chunks = lax.div(row, jnp.int32(self.chunk * self.heads))
        return chunks * self.chunk + lax.rem(row, jnp.int32(self.chunk))

    def column_query(self, query_tile: Array, column: Array) -> Array:
        """The query, of the batch row's, in a column; T or more in columns of padding."""
        return lax.div(query_tile * self.columns + column, jnp.int32(self.heads * self.group))

    def column_head(self, query_tile: Array, column: Array) -> Array:
        """The KV head, of the program's, that a column attends to."""
        within = lax.rem(query_tile * self.columns + column, jnp.int32(self.heads * self.group))
        return lax.div(within, jnp.int32(self.group))

    def to_columns(self, q: Array) -> Array:
        """[B, T, Hq, D] -> [B, programs over heads, query tiles, columns, D], padded with 0."""
        B, T, Hq, D = q.shape
        width = self.heads * self.group
        q = q.reshape(B, T, Hq // width, width, D).swapaxes(1, 2)
        q = q.reshape(B, Hq // width, T * width, D)
        padding = self.query_tiles * self.columns - T * width
        q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
        return q.reshape(B, Hq // width, self.query_tiles, self.columns, D)

    def from_columns(self, x: Array) -> Array:
        """[B, programs over heads, query tiles, columns, ...] -> [B, T, Hq, ...]."""
        B, parts = x.shape[:2]
        width, T, rest = self.heads * self.group, self.num_queries, x.shape[4:]
        x = x.reshape(B, parts, -1, *rest)[:, :, : T * width]
        x = x.reshape(B, parts, T, width, *rest).swapaxes(1, 2)
        return x.reshape(B, T, parts * width, *rest)
