"""Tuning parameters of the Mosaic GPU kernels: from a table of measurements, else from a rule."""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.paged_attention.spec import Call
from pallas_kernels.targets import TARGETS, Target

MAX_COLUMNS = 32  # more take more registers than a thread has
MAX_SPLITS = 256

# Constants of the rule, which knows no measurement:
COLUMNS = 8  # the fewest columns of a product
COPY_BYTES = 16 << 10  # the most that a copy brings: larger copies gain nothing
SMALL_COPY_BYTES = 8 << 10  # smaller copies cost too much to start
TILE_BYTES = 16 << 10  # a tile of keys
OUTPUTS = 4096  # elements of a program's output
SCORES = 2048  # scores of a tile
PROGRAMS_PER_CORE = 2  # one computes while the other waits
MAX_STAGES = 4
ROWS = 64  # rows of a tile that a product takes at a time
RESERVED_BYTES = 6 << 10  # shared memory of a program beside its tiles
SHARE_BYTES = 4 << 20  # a program's share: one long row must not keep all others waiting
PROGRAM_BANDWIDTH = 25 * 10**9  # bytes per second that one program takes in, at most
START_SECONDS = 2e-6  # from the start of a program to its first tile
COMBINE_SECONDS = 4e-6  # to combine the results of splits


@dataclass(frozen=True)
class Tuning:
    """How much a program takes at a time, and how many share the work. ValueError: bad values.

    block_kv: tokens of a tile of keys and values.
    kv_heads: neighbouring KV heads of a program; a block of all of them is one copy.
    num_stages: tiles in flight, the one in use included.
    query_columns: columns of the products: queries times query heads of the program.
    num_splits: programs that share a context.
    """

    block_kv: int
    kv_heads: int
    num_stages: int
    query_columns: int
    num_splits: int

    def __post_init__(self) -> None:
        if self.block_kv < 8 or self.block_kv % 8:
            raise ValueError(f"block_kv must be a positive multiple of 8, got {self.block_kv}")
        for name, least in (("kv_heads", 1), ("num_stages", 2), ("num_splits", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.query_columns % 8 or not 8 <= self.query_columns <= MAX_COLUMNS:
            raise ValueError(
                f"query_columns must be a multiple of 8 up to {MAX_COLUMNS}, got "
                f"{self.query_columns}"
            )


def default_tuning(call: Call) -> Tuning:
    """The table's entry for the call's GPU and geometry; by the rule where there is none.

    Without a GPU, as in the interpreter, the tuning is for an H200.
    """
    target = call.target or TARGETS["H200"]
    entry = _table().get(table_key(call, target))
    return Tuning(**entry) if entry else _by_rule(call, target)


def table_key(call: Call, target: Target) -> str:
    """The name of an entry: GPU, geometry, batch and table rounded up to powers of two."""
    geometry = f"{call.num_heads}/{call.num_kv_heads}/{call.head_size}"
    batch, tokens = (
        1 << (n - 1).bit_length() for n in (call.batch, call.max_blocks * call.block_size)
    )
    return (
        f"{target.name} {call.dtype.name} {geometry} block {call.block_size} "
        f"queries {call.num_queries} batch {batch} tokens {tokens}"
    )


@functools.cache
def _table() -> dict[str, Any]:
    text = Path(__file__).with_name("tuning_table.json").read_text()
    entries: dict[str, Any] = json.loads(text)
    return entries


def _by_rule(call: Call, target: Target) -> Tuning:
    row_bytes = call.head_size * call.dtype.itemsize
    per_head = call.num_queries * call.num_heads // call.num_kv_heads
    per_program = target.shared_memory_per_core // PROGRAMS_PER_CORE - RESERVED_BYTES
    kv_heads = _kv_heads(call, per_head, row_bytes, per_program)
    width = per_head * kv_heads
    # Registers hold the output and the scores.
    columns = min(-(-width // COLUMNS) * COLUMNS, MAX_COLUMNS, OUTPUTS // call.head_size)
    rows = max(ROWS, min(TILE_BYTES // row_bytes, SCORES // columns))
    tokens = _tokens(call, target, rows // kv_heads, kv_heads)

    stage_bytes = _stage_bytes(tokens * kv_heads, row_bytes)
    stages = max(2, min(MAX_STAGES, per_program // stage_bytes))
    per_core = target.shared_memory_per_core // (stages * stage_bytes + RESERVED_BYTES)
    splits = _splits(
        programs=call.batch * (call.num_kv_heads // kv_heads) * -(-width // columns),
        tiles=-(-call.max_blocks * call.block_size // tokens),
        tile_bytes=2 * tokens * kv_heads * row_bytes,
        result_bytes=4 * columns * call.head_size,
        slots=target.num_cores * max(1, per_core),
        bandwidth=target.memory_bandwidth,
    )
    return Tuning(tokens, kv_heads, stages, columns, splits)


def _stage_bytes(rows: int, row_bytes: int) -> int:
    """Shared memory of a tile of keys and one of values."""
    return 2 * -(-rows // ROWS) * ROWS * row_bytes


def _full_tile(block_size: int, kv_heads: int) -> int:
    """The fewest tokens of whole blocks that fill up the rows of a product."""
    return math.lcm(block_size, ROWS // math.gcd(ROWS, kv_heads))


def _kv_heads(call: Call, per_head: int, row_bytes: int, per_program: int) -> int:
    """The KV heads of a program; each has `per_head` columns.

    Heads that fill up the columns of one product cost nothing, and make copies fewer and larger.
    If copies are still small then, a second product is worth it. Where whole blocks take a tile of
    several products, two of them must fit into the shared memory `per_program`, in bytes.
    """

    def fits(heads: int) -> bool:
        rows = heads * _full_tile(call.block_size, heads)
        is_least = call.block_size > ROWS or rows == ROWS
        return is_least or 2 * _stage_bytes(rows, row_bytes) <= per_program

    def most(columns: int) -> int:
        return max(
            heads
            for heads in range(1, call.num_kv_heads + 1)
            if heads == 1
            or (
                call.num_kv_heads % heads == 0
                and fits(heads)
                and heads * per_head <= columns
                and heads * call.block_size * row_bytes <= COPY_BYTES
            )
        )

    heads = most(COLUMNS)
    is_small = heads * call.block_size * row_bytes < SMALL_COPY_BYTES
    return most(2 * COLUMNS) if is_small else heads


def _tokens(call: Call, target: Target, wanted: int, kv_heads: int) -> int:
    """Tokens of a tile, about as many as wanted: some blocks, or an even part of one.

    Blocks that fill up the rows of a product, unless that takes far too many of them.
    """
    S, D = call.block_size, call.head_size
    if wanted >= S:
        full = _full_tile(S, kv_heads)
        return max(full, wanted // full * full) if full <= 2 * wanted else wanted // S * S
    has_tma = target.compute_capability >= (9, 0)
    parts = [
        n
        for n in range(8, S + 1, 8)
        if S % n == 0
        and (has_tma or n * D % 2048 == 0)
        and 2 * _stage_bytes(n, D * call.dtype.itemsize) + RESERVED_BYTES
        <= target.shared_memory_per_block
    ]
    return min(parts, key=lambda n: abs(math.log(n / wanted)), default=S)


def _splits(
    *, programs: int, tiles: int, tile_bytes: int, result_bytes: int, slots: int, bandwidth: int
) -> int:
    """The fewest splits that take least time, if every context fills its table; small shares.

    programs: of one split; tiles, tile_bytes, result_bytes: of a program; slots: programs at once.
    """
    memory = programs * tiles * tile_bytes / bandwidth

    def seconds(splits: int) -> float:
        rounds = math.ceil(programs * splits / slots)
        program = START_SECONDS + math.ceil(tiles / splits) * tile_bytes / PROGRAM_BANDWIDTH
        results = 2 * programs * splits * result_bytes / bandwidth
        return max(memory, rounds * program) + (COMBINE_SECONDS + results if splits > 1 else 0)

    most = min(MAX_SPLITS, tiles)
    least = min(most, -(-tiles * tile_bytes // SHARE_BYTES))
    return min(range(least, most + 1), key=seconds)
