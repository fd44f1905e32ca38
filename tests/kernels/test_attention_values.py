"""Attention that runs on any device, against float64 numpy, with traps in all that is unused."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.lab.cases import AttentionCase, make_case
from pallas_kernels.lab.float64 import attended
from tests.kernels.attention_checks import (
    ANYWHERE,
    SCALE,
    check,
    contexts_for,
    jitted,
    standard_case,
)

anywhere = pytest.mark.parametrize("impl", ANYWHERE)


@anywhere
@pytest.mark.parametrize(
    ("block_size", "max_blocks"),
    [(1, 150), (4, 80), (16, 20), (48, 5), (128, 3), (256, 2)],
)
def test_decode_agrees_with_numpy_for_any_block_size(impl, block_size, max_blocks):
    rng = np.random.default_rng(block_size)
    contexts = contexts_for(rng, block_size, max_blocks)
    case = make_case(rng, contexts, block_size=block_size, max_blocks=max_blocks)
    check(impl, case, decode=True)


@anywhere
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(4, 4, 16), (4, 1, 16), (9, 3, 16), (1, 1, 8), (6, 2, 40)],
    ids=["MHA", "MQA", "GQA", "one head", "head size 40"],
)
def test_decode_agrees_with_numpy_for_any_heads(impl, num_heads, num_kv_heads, head_dim):
    rng = np.random.default_rng(num_heads)
    case = make_case(
        rng,
        [0, 1, 8, 30, 40],
        block_size=8,
        max_blocks=5,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    check(impl, case, decode=True)


OPTIONS = [
    {"soft_cap": 1.5},
    {"sliding_window": 1},
    {"sliding_window": 20},
    {"sliding_window": 10_000},
    {"soft_cap": 30.0, "sliding_window": 150},
    {"scale": 2.0},
]


@pytest.mark.parametrize(
    ("impl", "options"),
    [
        (impl, options)
        for impl in ANYWHERE
        for options in OPTIONS
        if (impl, "soft_cap" in options) != ("gather_sdpa", True)  # it has none
    ],
    ids=str,
)
def test_soft_cap_and_sliding_window_agree_with_numpy(impl, options):
    # With 130, 149 and 279 the window of the first query begins at slot 127.
    contexts = [0, 1, 15, 16, 17, 20, 127, 129, 130, 149, 279, 320]
    case = make_case(
        np.random.default_rng(3), contexts, block_size=16, max_blocks=20, num_queries=3
    )
    check(impl, case, **options)


@pytest.mark.parametrize(
    ("impl", "dtype", "tolerance"),
    [
        ("reference", ml_dtypes.bfloat16, 2e-2),
        ("reference", np.float16, 3e-3),
        ("xla", ml_dtypes.bfloat16, 2e-2),
        ("xla", np.float16, 3e-3),
        ("gather_sdpa", ml_dtypes.bfloat16, 2e-2),  # JAX has none in float16 on a CPU
    ],
)
def test_narrow_types_keep_float32_statistics(impl, dtype, tolerance):
    rng = np.random.default_rng(5)
    case = make_case(rng, [0, 1, 7, 16, 160], block_size=16, max_blocks=10, dtype=dtype)
    out, top, lse = check(impl, case, decode=True, tolerance=tolerance)
    assert out.dtype == dtype
    assert top.dtype == lse.dtype == jnp.float32
    _, wanted_top, wanted_lse = attended(case, scale=SCALE)[:3]
    np.testing.assert_allclose(top, wanted_top, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-4, atol=2e-4)


@anywhere
def test_large_scores_do_not_overflow(impl):
    case = standard_case(6)
    check(impl, AttentionCase(case.q * 300, case.k_cache * 300, *case[2:]), decode=True)


@anywhere
def test_equal_scores_of_minus_a_million_are_not_mistaken_for_masked(impl):
    case = standard_case(7)
    k_cache = np.where(np.isnan(case.k_cache), case.k_cache, np.float32(-1e6))
    check(impl, AttentionCase(np.abs(case.q), k_cache, *case[2:]), decode=True)


@anywhere
@settings(max_examples=40, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 40), min_size=10, max_size=10),
    new_tokens=st.lists(st.integers(0, 4), min_size=10, max_size=10),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_of_queries_at_any_place_in_any_context_agree_with_numpy(
    impl, contexts, new_tokens, seed
):
    """Queries may be the last tokens, stand before later ones, or have none at all to see."""
    starts = [max(0, c - new) for c, new in zip(contexts, new_tokens, strict=True)]
    case = make_case(
        np.random.default_rng(seed),
        contexts,
        block_size=4,
        max_blocks=10,
        num_queries=4,
        query_starts=starts,
    )
    check(impl, case)


@pytest.mark.parametrize(("num_queries", "sliding_window"), [(1, None), (8, 50)])
def test_xla_results_are_bitwise_the_same_for_block_sizes_that_divide_its_chunk(
    num_queries, sliding_window
):
    """The same tokens under other tables: sums run in the same order."""
    rng = np.random.default_rng(11)
    longest, Hk, D = 256, 2, 16
    contexts = [8, 9, 16, 60, 64, 127, 128, 129, 200, 255, 256]
    shape = (len(contexts), longest, Hk, D)
    keys, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((len(contexts), num_queries, 4, D)).astype(np.float32)
    results = []
    for S in (1, 4, 16, 64, 128):
        case = make_case(
            rng, contexts, block_size=S, max_blocks=longest // S, num_queries=num_queries
        )
        for row, context in enumerate(contexts):
            at = np.arange(context)
            blocks = case.tables[row, at // S]
            case.k_cache[blocks, :, at % S] = keys[row, :context]
            case.v_cache[blocks, :, at % S] = values[row, :context]
        attend = jitted("xla", sliding_window=sliding_window)
        results.append(attend(q, *case[1:]))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x, y)
