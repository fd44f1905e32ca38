"""The Triton kernel: against float64 in the interpreter, lowered for every GPU, its refusals."""

import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import targets
from pallas_kernels.lab import aot
from pallas_kernels.lab.cases import AttentionCase, make_case
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Call,
    Unsupported,
    paged_prefill_attention,
    refusal,
    resolve,
)
from pallas_kernels.paged_attention.triton import TritonTuning, default_tuning
from pallas_kernels.targets import TARGETS, compiling_for
from tests.kernels.attention_checks import SCALE, check, contexts_for, jitted

# Small tiles, and more shares than short contexts have tiles.
SMALL = TritonTuning(block_kv=16, block_rows=16, num_splits=3)


def interpreted(case: AttentionCase, **options) -> list[jax.Array]:
    return check("triton", case, interpret=True, **options)


@pytest.mark.parametrize(
    ("block_size", "max_blocks"), [(1, 70), (2, 30), (4, 20), (12, 7), (16, 5), (48, 2), (256, 1)]
)
def test_decode_agrees_with_numpy_for_any_block_size(block_size, max_blocks):
    rng = np.random.default_rng(block_size)
    contexts = contexts_for(rng, block_size, max_blocks)
    case = make_case(rng, contexts, block_size=block_size, max_blocks=max_blocks)
    interpreted(case, decode=True, tuning=SMALL)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(3, 3, 64), (16, 1, 32), (9, 3, 8), (20, 1, 40)],
    ids=["MHA", "MQA", "head size 8", "more heads than rows of a tile"],
)
def test_decode_agrees_with_numpy_for_any_heads(num_heads, num_kv_heads, head_dim):
    case = make_case(
        np.random.default_rng(num_heads),
        [0, 1, 8, 30, 40],
        block_size=4,
        max_blocks=10,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    interpreted(case, decode=True, tuning=SMALL)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(ml_dtypes.bfloat16, 2e-2), (np.float16, 3e-3)], ids=["bf16", "f16"]
)
def test_narrow_types_keep_float32_statistics(dtype, tolerance):
    case = make_case(
        np.random.default_rng(5), [0, 1, 16, 70], block_size=2, max_blocks=40, dtype=dtype
    )
    out, top, lse = interpreted(case, decode=True, tolerance=tolerance)
    assert out.dtype == dtype
    assert top.dtype == lse.dtype == jnp.float32


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 1}, {"sliding_window": 21}, {"soft_cap": 1.5, "sliding_window": 40}],
    ids=str,
)
def test_queries_anywhere_in_their_context_agree_with_numpy(options):
    """Seven queries of three heads: two tiles of rows, the second not full."""
    case = make_case(
        np.random.default_rng(7),
        [0, 1, 30, 50, 96, 96, 3],
        block_size=12,
        max_blocks=8,
        num_queries=7,
        num_heads=6,
        query_starts=[0, 0, 23, 20, 0, 89, 5],
    )
    interpreted(case, tuning=SMALL, **options)


def test_large_scores_and_rows_of_nan_stay_in_their_place():
    case = make_case(np.random.default_rng(8), [40, 0, 33, 7], block_size=4, max_blocks=10)
    large = AttentionCase(case.q * 300, case.k_cache * 300, *case[2:])
    good = interpreted(large, tuning=SMALL)
    q = large.q.copy()
    q[2] = np.nan
    attend = jitted("triton", interpret=True, tuning=SMALL)
    for before, after in zip(good, attend(q, *large[1:]), strict=True):
        assert np.isnan(after[2]).all()
        np.testing.assert_array_equal(np.delete(before, 2, axis=0), np.delete(after, 2, axis=0))


def shapes(
    num_queries: int, block_size: int, head_size: int, dtype: str, num_blocks: int = 256
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments of a call with 32 query heads for 8 KV heads."""
    cache = jax.ShapeDtypeStruct((num_blocks, 8, block_size, head_size), dtype)
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    return (
        jax.ShapeDtypeStruct((4, num_queries, 32, head_size), dtype),
        cache,
        cache,
        jax.ShapeDtypeStruct((4, 64), jnp.int32),
        rows,
        rows,
    )


def attend(*arrays):
    return paged_prefill_attention(
        *arrays, scale=SCALE, soft_cap=30.0, sliding_window=100, impl="triton"
    )


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("num_queries", "block_size", "head_size"),
    [(1, 1, 128), (1, 48, 64), (128, 2, 80), (128, 16, 96), (1, 4, 256), (128, 256, 256)],
)
def test_it_lowers_for_every_gpu(target, dtype, num_queries, block_size, head_size):
    (kernel,) = aot.lower(attend, shapes(num_queries, block_size, head_size, dtype), target)
    assert kernel.backend == "triton"


def test_lowering_passes_on_that_jax_deprecates_pallas_triton():
    with pytest.warns(DeprecationWarning, match="Pallas Triton backend is deprecated"):
        aot.lower(attend, shapes(1, 4, 128, "bfloat16"), TARGETS["H200"])


def call(dtype: str = "float32", head_size: int = 64, **options) -> Call:
    return Call(
        batch=1,
        num_queries=1,
        num_heads=32,
        num_kv_heads=8,
        head_size=head_size,
        block_size=4,
        num_blocks=10_000,
        max_blocks=8192,
        dtype=jnp.dtype(dtype),
        options=AttentionOptions(SCALE, **options),
        target=targets.current(),
    )


def test_a_small_batch_is_shared_out_over_the_gpu_and_a_large_one_is_not():
    with compiling_for(TARGETS["H200"]):
        one = call()
        many = Call(**vars(one) | {"batch": 64})
    assert 132 <= default_tuning(one).num_splits * one.num_kv_heads <= 4 * 132
    assert default_tuning(many).num_splits == 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"dtype": "int8"}, "it takes bfloat16, float16, float32, not int8"),
        ({"head_size": 320}, "head sizes up to 256, not 320"),
        ({"tuning": "fast"}, "its tuning is a TritonTuning, not 'fast'"),
    ],
    ids=str,
)
def test_a_call_beyond_it_is_refused(wrong, reason):
    with compiling_for(TARGETS["A100"]):
        assert reason in refusal("triton", call(**wrong))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"block_kv": 48}, "block_kv must be 16, 32, 64, 128 or 256, got 48"),
        ({"block_kv": 8}, "block_kv must be .* got 8"),
        ({"block_rows": 512}, "block_rows must be .* got 512"),
        ({"num_splits": 0}, "num_splits must be at least 1, got 0"),
        ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
        ({"num_warps": 3}, "num_warps must be 1, 2, 4, 8 or 16, got 3"),
    ],
    ids=str,
)
def test_sizes_that_triton_cannot_do_are_refused(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        TritonTuning(**{"block_kv": 64, "block_rows": 16} | wrong)


def test_a_jax_without_pallas_triton_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    with compiling_for(TARGETS["H200"]), pytest.raises(Unsupported, match="no longer carries") as e:
        resolve("triton", call())
    assert jax.__version__ in str(e.value)
    with compiling_for(TARGETS["H200"]):
        assert resolve("auto", call()) == "xla"
