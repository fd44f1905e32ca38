"""How a kernel cuts caches into tiles, and queries into the columns of a matrix product.

A program of a kernel takes one row of the batch, a few neighbouring KV heads and a share of the
context. It fetches keys and values in tiles: `tokens` tokens of `heads` heads, one token of one
head in a row of the tile. A block of neighbouring heads is contiguous in the cache, so that one
copy fetches a block for all heads of the program. All queries of these heads, padded to
`columns`, meet all rows of a tile in one product; what belongs to different heads is masked. As
a product needs at least 8 columns, heads that fill them cost nothing, and save copies.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

# A product takes rows of the tile 64 at a time, 16 to a warp.
ROW_MULTIPLE = 64


def quotient(x: Array, divisor: int) -> Array:
    """x // divisor for x and divisor in [0, 1024), elementwise.

    It avoids a division: where LLVM sees that 16 bits are enough for one, it makes of it an
    instruction that GPUs do not have, and aborts.
    """
    if divisor & (divisor - 1) == 0:
        return x >> (divisor.bit_length() - 1)
    return (x * -(-(1 << 20) // divisor)) >> 20


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
    def width(self) -> int:
        """Columns of a query: its heads, of the program's KV heads."""
        return self.heads * self.group

    @property
    def rows(self) -> int:
        """Rows of a tile in shared memory, with the rows that no copy writes."""
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
        return -(-self.num_queries * self.width // self.columns)

    def row_head(self, row: Array) -> Array:
        """The head, of the program's, in a row of the tile."""
        chunk = quotient(row, self.chunk)
        return chunk - quotient(chunk, self.heads) * self.heads

    def row_token(self, row: Array) -> Array:
        """The token, of the tile's, in a row; `tokens` or more where no copy writes."""
        within = row - quotient(row, self.chunk) * self.chunk
        return quotient(row, self.chunk * self.heads) * self.chunk + within

    def first_query(self, query_tile: Array) -> Array:
        """The query, of the batch row's, in a program's first column."""
        return lax.div(query_tile * self.columns, jnp.int32(self.width))

    def last_query(self, query_tile: Array) -> Array:
        """The query in a program's last column that is not padding."""
        last = lax.div((query_tile + 1) * self.columns - 1, jnp.int32(self.width))
        return jnp.minimum(last, self.num_queries - 1)

    def column_query(self, query_tile: Array, column: Array) -> Array:
        """The query, of the batch row's, in a column; T or more in columns of padding."""
        place = lax.rem(query_tile * self.columns, jnp.int32(self.width)) + column
        return self.first_query(query_tile) + quotient(place, self.width)

    def column_head(self, query_tile: Array, column: Array) -> Array:
        """The KV head, of the program's, that a column attends to."""
        place = lax.rem(query_tile * self.columns, jnp.int32(self.width)) + column
        return quotient(place - quotient(place, self.width) * self.width, self.group)

    def to_columns(self, q: Array) -> Array:
        """[B, T, Hq, D] -> [B, programs over heads, query tiles, columns, D], padded with 0."""
        B, T, Hq, D = q.shape
        width = self.width
        q = q.reshape(B, T, Hq // width, width, D).swapaxes(1, 2)
        q = q.reshape(B, Hq // width, T * width, D)
        padding = self.query_tiles * self.columns - T * width
        q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
        return q.reshape(B, Hq // width, self.query_tiles, self.columns, D)

    def from_columns(self, x: Array) -> Array:
        """[B, programs over heads, query tiles, columns, ...] -> [B, T, Hq, ...]."""
        B, parts = x.shape[:2]
        width, T, rest = self.width, self.num_queries, x.shape[4:]
        x = x.reshape(B, parts, -1, *rest)[:, :, : T * width]
        x = x.reshape(B, parts, T, width, *rest).swapaxes(1, 2)
        return x.reshape(B, T, parts * width, *rest)
