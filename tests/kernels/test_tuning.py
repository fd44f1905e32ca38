"""Tuning of the Mosaic GPU kernels: bad values, the table, the rule where there is no entry."""

import itertools
from dataclasses import asdict, replace

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import AttentionOptions, Call
from pallas_kernels.paged_attention.mosaic_gpu import api as mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu import tuning
from pallas_kernels.paged_attention.mosaic_gpu.tuning import Tuning, default_tuning, table_key
from pallas_kernels.targets import TARGETS

OPTIONS = AttentionOptions(0.1)
GOOD = {"block_kv": 64, "kv_heads": 1, "num_stages": 3, "query_columns": 8, "num_splits": 1}


def call(
    target: str = "H200",
    *,
    heads: tuple[int, int, int] = (32, 8, 128),
    batch: int = 64,
    queries: int = 1,
    block_size: int = 16,
    tokens: int = 4096,
) -> Call:
    """Heads, KV heads and head size; the table is as wide as `tokens`, or a little wider."""
    blocks = -(-tokens // block_size)
    sizes = (batch, queries, *heads, block_size, batch * blocks, blocks)
    return Call(*sizes, jnp.dtype(jnp.bfloat16), OPTIONS, TARGETS[target])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("block_kv", 0, "positive multiple of 8, got 0"),
        ("block_kv", 20, "positive multiple of 8, got 20"),
        ("kv_heads", 0, "1 or more, got 0"),
        ("num_stages", 1, "2 or more, got 1"),
        ("num_splits", 0, "1 or more, got 0"),
        ("query_columns", 12, "multiple of 8 up to 32, got 12"),
        ("query_columns", 40, "multiple of 8 up to 32, got 40"),
    ],
)
def test_bad_values_are_refused(name, value, reason):
    with pytest.raises(ValueError, match=f"{name} must be.* {reason}"):
        Tuning(**GOOD | {name: value})


def test_entry_of_the_table_goes_before_the_rule(monkeypatch):
    measured = replace(default_tuning(call()), num_stages=2, num_splits=9)
    entries = {table_key(call(), TARGETS["H200"]): asdict(measured)}
    monkeypatch.setattr(tuning, "_table", lambda: entries)
    assert default_tuning(call()) == measured
    # Batches and tables up to the next power of two are alike, other geometries are not.
    assert default_tuning(call(batch=40, tokens=3000)) == measured
    for other in (call(batch=65), call(tokens=5000), call(block_size=32), call("B200")):
        assert default_tuning(other) != measured


def test_entries_of_the_table_are_good():
    for entry in tuning._table().values():
        Tuning(**entry)


def test_without_a_gpu_it_is_that_of_an_h200():
    assert default_tuning(replace(call(), target=None)) == default_tuning(call("H200"))


GEOMETRIES = ((32, 8, 128), (40, 40, 128), (9, 3, 64), (64, 1, 128), (16, 8, 256))


@pytest.mark.parametrize("target", TARGETS)
def test_rule_fits_every_call_that_the_kernel_takes(target):
    choices = itertools.product(GEOMETRIES, (1, 64), (1, 3, 100), (8, 16, 48, 88, 128, 208, 256))
    for heads, batch, queries, block_size in choices:
        one = call(target, heads=heads, batch=batch, queries=queries, block_size=block_size)
        is_too_small = target == "L4" and heads[2] == 256
        if mosaic_gpu.refused(one) is None and not is_too_small:
            assert mosaic_gpu.refusal(one) is None, one


def test_heads_share_a_tile_where_that_fills_its_columns_or_small_copies():
    def heads(*geometry: int, **changes: int) -> tuple[int, int]:
        chosen = default_tuning(call(heads=geometry, **changes))
        return chosen.kv_heads, chosen.query_columns

    assert heads(32, 8, 128) == (2, 8)
    assert heads(40, 40, 128) == (4, 8)  # a copy of 8 heads would be too large
    assert heads(64, 8, 128) == (2, 16)  # one head fills the columns, but its copy is small
    assert heads(64, 8, 128, block_size=32) == (1, 8)
    assert heads(9, 3, 64) == (3, 16)
    assert heads(32, 8, 128, queries=2) == (2, 16)
    assert heads(32, 8, 128, queries=100) == (1, 32)


def test_contexts_are_split_where_programs_are_few():
    def splits(**changes: int) -> int:
        return default_tuning(call(**changes)).num_splits

    assert splits(batch=64) == 1
    # Four programs to a row: together about as many as an H200 runs at once.
    assert 132 <= 4 * splits(batch=1, tokens=32_768) <= 2 * 132
    assert splits(batch=1, tokens=256) == 8  # no more than there are tiles
    assert splits(batch=64, tokens=32_768) == 8  # 4 MiB for each
