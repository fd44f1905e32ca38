"""The Mosaic GPU kernels in Pallas' interpreter, watched for races, against float64 numpy.

What differs between cases is what takes another path through the kernel: tiles of several heads, of
several blocks, of a part of one; rows that no copy writes; queries over several programs; splits.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lab import interpreter
from pallas_kernels.lab.attention import Spec
from pallas_kernels.lab.cases import AttentionCase, make_case
from pallas_kernels.lab.checks import CheckResult, check_values
from pallas_kernels.lab.float64 import attended
from pallas_kernels.lab.worker import Worker
from pallas_kernels.paged_attention import AttentionOptions, Call, refusal
from pallas_kernels.paged_attention.mosaic_gpu.contiguous import contiguous_attention
from pallas_kernels.paged_attention.mosaic_gpu.tiles import Tiles, quotient
from pallas_kernels.paged_attention.mosaic_gpu.tuning import Tuning
from pallas_kernels.targets import TARGETS, compiling_for
from tests.compiler import needs_compiler

# Contexts of nothing, one token, exact multiples of blocks and tiles, the whole table, and others.
DECODE = {"context_lens": [0, 1, 64, 77, 128], "block_size": 16, "max_blocks": 8}
SCALE = 0.1
TIMEOUT_S = 120  # of one case, which takes a few seconds

# (case, options, tuning)
CASES = {
    "heads_that_share_a_tile": (
        DECODE | {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128},
        {},
        Tuning(block_kv=32, kv_heads=2, num_stages=3, query_columns=8, num_splits=1),
    ),
    "splits_more_than_tiles": (
        DECODE | {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64},
        {},
        Tuning(block_kv=32, kv_heads=4, num_stages=2, query_columns=8, num_splits=5),
    ),
    "rows_that_no_copy_writes": (
        DECODE | {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
        {},
        Tuning(block_kv=32, kv_heads=3, num_stages=2, query_columns=16, num_splits=2),
    ),
    "tiles_that_are_parts_of_blocks": (
        {"context_lens": [0, 1, 128, 150], "block_size": 128, "max_blocks": 2}
        | {"num_heads": 6, "num_kv_heads": 2, "head_dim": 128},
        {"soft_cap": 2.0},
        Tuning(block_kv=32, kv_heads=2, num_stages=3, query_columns=8, num_splits=2),
    ),
    "block_size_48_and_float16": (
        {"context_lens": [0, 48, 100], "block_size": 48, "max_blocks": 3}
        | {"num_heads": 16, "num_kv_heads": 1, "head_dim": 64, "dtype": np.float16},
        {"sliding_window": 40},
        Tuning(block_kv=48, kv_heads=1, num_stages=2, query_columns=16, num_splits=2),
    ),
    "queries_over_several_programs": (
        DECODE
        | {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "num_queries": 9}
        | {"query_starts": [-4, -8, 10, 68, 119]},
        {"sliding_window": 33, "soft_cap": 5.0},
        Tuning(block_kv=32, kv_heads=2, num_stages=2, query_columns=24, num_splits=2),
    ),
    "more_query_heads_than_columns": (
        {"context_lens": [0, 5, 30], "block_size": 8, "max_blocks": 4}
        | {"num_heads": 20, "num_kv_heads": 1, "head_dim": 256, "num_queries": 2},
        {},
        Tuning(block_kv=64, kv_heads=1, num_stages=2, query_columns=16, num_splits=1),
    ),
}
WGMMA_CASES = (
    "heads_that_share_a_tile",
    "rows_that_no_copy_writes",
    "queries_over_several_programs",
)


@pytest.fixture(scope="module")
def worker():
    """A process for the interpreter, in which a barrier with a wrong count waits forever."""
    with Worker({"JAX_PLATFORMS": "cpu"}) as worker:
        yield worker


def passes(worker, function, *args) -> CheckResult:
    outcome = worker.call(function, args, TIMEOUT_S)
    assert outcome.status == "returned", f"{outcome.reason}\n{outcome.details}"
    result = outcome.value
    assert result.verdict == "pass", f"{result.reason}\n{result.details}"
    return result


def make(name: str) -> tuple[AttentionCase, AttentionOptions]:
    shape, options, tuning = CASES[name]
    case = make_case(np.random.default_rng(len(name)), **{"dtype": jnp.bfloat16} | shape)
    options = AttentionOptions(SCALE, interpret=True, detect_races=True, tuning=tuning, **options)
    return case, options


@pytest.mark.parametrize(
    ("impl", "name"),
    [("mosaic_gpu", name) for name in CASES] + [("mosaic_gpu_wgmma", name) for name in WGMMA_CASES],
)
def test_agrees_with_numpy_without_races(worker, impl, name):
    result = passes(worker, "pallas_kernels.lab.checks:check_values", impl, *make(name))
    assert result.races is False  # and not None: they were looked for


def check_on_a100(name: str) -> CheckResult:
    with compiling_for(TARGETS["A100"]):
        return check_values("mosaic_gpu", *make(name))


def test_ring_of_cp_async_brings_the_right_tiles(worker):
    passes(worker, f"{__name__}:check_on_a100", "heads_that_share_a_tile")


def check_contiguous() -> None:
    # Blocks of 128 tokens, one to a row, are contiguous caches.
    case = make_case(
        np.random.default_rng(1),
        [0, 1, 64, 77, 128],
        block_size=128,
        max_blocks=1,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        dtype=jnp.bfloat16,
    )
    blocks = np.where(case.context_lens > 0, case.tables[:, 0], 0)
    arrays = case.k_cache[blocks], case.v_cache[blocks], case.context_lens, case.query_starts
    tuning = Tuning(32, kv_heads=2, num_stages=2, query_columns=8, num_splits=2)
    options = AttentionOptions(SCALE, interpret=True, detect_races=True, tuning=tuning)
    attend = jax.jit(partial(contiguous_attention, options=options))
    results = interpreter.watch(lambda: jax.block_until_ready(attend(case.q, *arrays))).result
    for actual, wanted in zip(results, attended(case, scale=SCALE)[:3], strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=0.01, atol=0.01)


def test_contiguous_caches_agree_with_numpy(worker):
    outcome = worker.call(f"{__name__}:check_contiguous", (), TIMEOUT_S)
    assert outcome.status == "returned", f"{outcome.reason}\n{outcome.details}"


def test_contiguous_caches_hold_whole_tiles():
    q, lens = jnp.zeros((1, 1, 1, 64), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    options = AttentionOptions(SCALE, interpret=True)
    for length, reason in ((100, "blocks of 16"), (80, "tiles of 128")):
        caches = [jnp.zeros((1, 1, length, 64), jnp.bfloat16)] * 2
        with pytest.raises(ValueError, match=f"{length} tokens are no multiple of {reason}"):
            contiguous_attention(q, *caches, lens, lens, options=options)


CALL = Call(
    *(4, 1, 8, 2, 128, 16, 64, 8, jnp.dtype(jnp.bfloat16)),
    AttentionOptions(SCALE),
    TARGETS["H200"],
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": None}, "needs an NVIDIA GPU; interpret=True"),
        ({"dtype": jnp.dtype(jnp.float32)}, "bfloat16 and float16, not float32"),
        ({"head_size": 80}, r"one of \(64, 128, 256\) \(cache_head_size\), got 80"),
        ({"block_size": 4}, "multiple of 8 tokens.*got 4"),
        ({"head_size": 64, "target": TARGETS["A100"]}, "multiple of 2048 elements, got 16 \\* 64"),
        ({"num_blocks": 2**26}, "2\\*\\*31 rows or more"),
        ({"num_heads": 1026}, "513 query heads of a program are more than 512"),
        ({"batch": 70_000}, "70000 rows in . splits are more than 65535"),
        (
            {"head_size": 256, "target": TARGETS["L4"]},
            "shared memory, of which a program has 101376",
        ),
    ],
)
def test_refuses_with_the_reason(changes, reason):
    assert refusal("mosaic_gpu", CALL) is None
    assert re.search(reason, refusal("mosaic_gpu", replace(CALL, **changes)))


@pytest.mark.parametrize(
    ("tuning", "target", "reason"),
    [
        (Tuning(32, 4, 2, 8, 1), "H200", "2 KV heads are no multiple of the 4"),
        (Tuning(24, 1, 2, 8, 1), "H200", "24 tokens and a block of 16 neither divides the other"),
        (Tuning(8, 1, 2, 8, 1), "A100", "multiple of 2048 elements, got 8 \\* 128"),
        (Tuning(64, 1, 2, 24, 1), "A100", "multiple of them, got 24 \\* 128"),
        (Tuning(128, 2, 4, 8, 1), "H200", "shared memory, of which a program has 232448"),
    ],
)
def test_refuses_a_tuning_that_does_not_fit_the_call(tuning, target, reason):
    options = replace(CALL.options, tuning=tuning)
    call = replace(CALL, options=options, target=TARGETS[target])
    assert re.search(reason, refusal("mosaic_gpu", call))


def test_a_tuning_of_another_kernel_is_an_error():
    with pytest.raises(ValueError, match="tuning must be a Tuning, got 64"):
        refusal("mosaic_gpu", replace(CALL, options=replace(CALL.options, tuning=64)))


def test_wgmma_is_for_hopper_alone():
    assert refusal("mosaic_gpu_wgmma", CALL) is None
    for target in ("A100", "L4", "B200"):
        reason = refusal("mosaic_gpu_wgmma", replace(CALL, target=TARGETS[target]))
        assert f"9.0 alone, which a {target} has not" in reason


@needs_compiler
@pytest.mark.parametrize("target", ["H200", "A100"])
def test_compiles_where_no_size_is_a_power_of_two(worker, target):
    # In another process: LLVM aborts on code that it cannot compile.
    spec = Spec("", num_queries=5, num_heads=9, num_kv_heads=3, block_size=48)
    passes(worker, "pallas_kernels.lab.checks:check_lowering", "mosaic_gpu", spec, target, True)


def test_quotient_is_exact():
    x = jnp.arange(1024)
    for divisor in range(1, 1024):
        np.testing.assert_array_equal(quotient(x, divisor), np.arange(1024) // divisor)


TILES = Tiles(
    heads=3, group=2, num_queries=5, columns=8, tokens=32, chunk=16, head_size=64, joined=True
)


@pytest.mark.parametrize("tiles", [TILES, replace(TILES, chunk=32, joined=False)], ids=str)
def test_every_token_of_every_head_has_a_row_of_a_tile(tiles):
    rows = jnp.arange(tiles.rows)
    places = list(zip(tiles.row_head(rows).tolist(), tiles.row_token(rows).tolist(), strict=True))
    written = places[: tiles.copies * tiles.copy_rows]
    assert sorted(written) == [(head, token) for head in range(3) for token in range(32)]
    assert all(token >= tiles.tokens for _, token in places[len(written) :])
    # The rows of a copy are one stretch of the cache: a chunk of one head, or of each in turn.
    for first in range(0, len(written), tiles.copy_rows):
        heads, tokens = zip(*written[first : first + tiles.copy_rows], strict=True)
        assert list(heads) == sorted(heads)
        assert set(tokens) == set(range(tokens[0], tokens[0] + tiles.chunk))


def test_every_query_of_every_head_has_a_column():
    q = jnp.arange(2 * 5 * 12 * 64).reshape(2, 5, 12, 64)  # [B, T, Hq, D], 6 KV heads
    columns = TILES.to_columns(q)  # [B, 2, query tiles, 8, D]
    assert columns.shape == (2, 2, TILES.query_tiles, 8, 64)
    np.testing.assert_array_equal(TILES.from_columns(columns), q)
    for part, tile, column in np.ndindex(columns.shape[1:4]):
        query = int(TILES.column_query(jnp.int32(tile), jnp.int32(column)))
        head = part * TILES.heads + int(TILES.column_head(jnp.int32(tile), jnp.int32(column)))
        lanes = columns[:, part, tile, column]
        if query >= TILES.num_queries:
            assert not lanes.any()
        else:
            of_head = q[:, query, head * TILES.group : (head + 1) * TILES.group]
            assert (of_head == lanes[:, None]).all(-1).any(-1).all()
