"""Tuning parameters of the Mosaic GPU kernels: from a table of measurements, else from a rule."""

import functools
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pallas_kernels.paged_attention.spec import Call
from pallas_kernels.targets import TARGETS, Target

MAX_COLUMNS = 32
# Of the rule. Larger copies would not be faster, and leave fewer tiles to choose from.
COPY_BYTES = 16 << 10
TILE_BYTES = 16 << 10  # keys of a tile
PROGRAMS_PER_CORE = 2
MAX_STAGES = 4
# Work that a program has besides its tiles, in tiles: it starts, waits for its first tile, stores.
START_TILES = 2
MAX_SPLITS = 64
# The rest of a core's shared memory: what CUDA keeps of it, reductions, weights.
RESERVED_BYTES = 6 << 10


@dataclass(frozen=True)
class Tuning:
    """What a program takes at a time, and how many share the work. ValueError for bad values.

    block_kv: tokens of a tile of keys and values.
    kv_heads: neighbouring KV heads of a program; a block of all of them is one copy.
    num_stages: tiles in flight, the one in use included.
    query_columns: columns of the products: queries times query heads of the program.
    num_splits: programs among which a context is shared out.
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
    """The table's entry for the call's GPU and geometry; where there is none, the rule's.

    Without a GPU, as in the interpreter, that of an H200.
    """
    target = call.target or TARGETS["H200"]
    entry = _table().get(table_key(call, target))
    return Tuning(**entry) if entry else _by_rule(call, target)


def table_key(call: Call, target: Target) -> str:
    """What an entry is for: GPU, geometry, powers of two of batch and table."""
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
    text = resources.files(__package__).joinpath("tuning_table.json").read_text()
    entries: dict[str, Any] = json.loads(text)
    return entries


def _by_rule(call: Call, target: Target) -> Tuning:
    group = call.num_heads // call.num_kv_heads
    row_bytes = call.head_size * call.dtype.itemsize
    S = call.block_size
    kv_heads = 1
    if call.num_queries == 1:
        # Heads that fill the columns of a product cost nothing and make copies fewer and larger.
        kv_heads = max(
            heads
            for heads in range(1, call.num_kv_heads + 1)
            if heads == 1
            or (
                call.num_kv_heads % heads == 0
                and heads * group <= 8
                and heads * S * row_bytes <= COPY_BYTES
            )
        )
    rows = max(64, TILE_BYTES // row_bytes // 64 * 64)
    tokens = max(8, rows // kv_heads)
    if tokens > S:
        tokens = tokens // S * S
    elif S % tokens:
        tokens = S
    width = call.num_queries * kv_heads * group
    columns = min(-(-width // 8) * 8, 32)

    stage_bytes = 2 * -(-tokens * kv_heads // 64) * 64 * row_bytes
    per_program = target.shared_memory_per_core // PROGRAMS_PER_CORE - RESERVED_BYTES
    stages = max(2, min(MAX_STAGES, per_program // stage_bytes))
    programs = call.batch * (call.num_kv_heads // kv_heads) * -(-width // columns)
    slots = target.num_cores * max(
        1, target.shared_memory_per_core // (stages * stage_bytes + RESERVED_BYTES)
    )
    tiles = -(-call.max_blocks * S // tokens)
    return Tuning(tokens, kv_heads, stages, columns, _splits(programs, tiles, slots))


def _splits(programs: int, tiles: int, slots: int) -> int:
    """The fewest splits for which all programs, of at most ``tiles`` tiles, are done soonest."""

    def time(splits: int) -> int:
        rounds = math.ceil(programs * splits / slots)
        return rounds * (math.ceil(tiles / splits) + START_TILES)

    return min(range(1, min(MAX_SPLITS, tiles) + 1), key=time)
