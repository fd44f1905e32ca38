"""Every implementation of paged attention against float64 numpy, with traps in all that is unused.

A new implementation is tested by being registered.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, expected, make_case

from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    AttentionOptions,
    Call,
    choose,
    paged_attention,
    paged_prefill_attention,
    resolve,
)

SCALE = 16**-0.5
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


@cache
def jitted(impl: str, decode: bool = False, **options):
    """One function per choice of options, so that tests of equal shapes share a compilation."""
    options = {"scale": SCALE, "impl": impl} | options
    if decode:
        return jax.jit(partial(paged_attention, return_residuals=True, **options))
    return jax.jit(partial(paged_prefill_attention, **options))


def check(impl: str, case: Case, *, decode: bool = False, tolerance: float = 2e-5, **options):
    """Output and softmax statistics agree with numpy, and no NaN shows."""
    if decode:
        results = jitted(impl, True, **options)(*case.decode_arrays)
        results = [x[:, None] for x in results]
    else:
        results = jitted(impl, **options)(*case.arrays)
    for name, actual, wanted in zip(
        ("out", "max", "lse"), results, expected(case, **{"scale": SCALE} | options), strict=True
    ):
        actual = np.asarray(actual, np.float64)
        np.testing.assert_allclose(
            actual, wanted, rtol=tolerance, atol=tolerance, err_msg=f"{name} of {impl}"
        )
    return results


def contexts_for(rng: np.random.Generator, block_size: int, max_blocks: int) -> list[int]:
    """Of 11 rows: nothing, one token, around a block's size and the table's, and others."""
    longest = block_size * max_blocks
    edges = [0, 1, block_size - 1, block_size, block_size + 1, longest, longest - 1]
    others = rng.integers(1, longest, 4).tolist()
    return rng.permutation([min(max(context, 0), longest) for context in edges + others]).tolist()


@every_implementation
@pytest.mark.parametrize(
    ("block_size", "max_blocks"),
    [(1, 150), (4, 80), (16, 20), (48, 5), (128, 3), (256, 2)],
)
def test_decode_agrees_with_numpy_for_any_block_size(impl, block_size, max_blocks):
    rng = np.random.default_rng(block_size)
    contexts = contexts_for(rng, block_size, max_blocks)
    case = make_case(rng, contexts, block_size=block_size, max_blocks=max_blocks)
    check(impl, case, decode=True)


@every_implementation
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


@every_implementation
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_soft_cap_and_sliding_window_agree_with_numpy(impl, options):
    # With 130, 149 and 279 the window of the first query begins at slot 127.
    contexts = [0, 1, 15, 16, 17, 20, 127, 129, 130, 149, 279, 320]
    case = make_case(
        np.random.default_rng(3), contexts, block_size=16, max_blocks=20, num_queries=3
    )
    check(impl, case, **options)


@every_implementation
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(ml_dtypes.bfloat16, 2e-2), (np.float16, 3e-3)], ids=["bf16", "f16"]
)
def test_narrow_types_keep_float32_statistics(impl, dtype, tolerance):
    rng = np.random.default_rng(5)
    case = make_case(rng, [0, 1, 7, 16, 160], block_size=16, max_blocks=10, dtype=dtype)
    out, top, lse = check(impl, case, decode=True, tolerance=tolerance)
    assert out.dtype == dtype
    assert top.dtype == lse.dtype == jnp.float32
    _, wanted_top, wanted_lse = expected(case, scale=SCALE)
    np.testing.assert_allclose(top, wanted_top, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-4, atol=2e-4)


def standard_case(seed: int) -> Case:
    """One shape for many tests, so that it is compiled once. On a CPU "xla" takes it in groups of
    three rows."""
    rng = np.random.default_rng(seed)
    return make_case(
        rng,
        contexts_for(rng, 16, 20),
        block_size=16,
        max_blocks=20,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
    )


@every_implementation
def test_large_scores_do_not_overflow(impl):
    case = standard_case(6)
    check(impl, Case(case.q * 300, case.k_cache * 300, *case.arrays[2:]), decode=True)


@every_implementation
def test_equal_scores_of_minus_a_million_are_not_mistaken_for_masked(impl):
    case = standard_case(7)
    k_cache = np.where(np.isnan(case.k_cache), case.k_cache, np.float32(-1e6))
    check(impl, Case(np.abs(case.q), k_cache, *case.arrays[2:]), decode=True)


@every_implementation
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


@every_implementation
def test_rows_that_share_blocks_agree_with_numpy(impl):
    """Every row reads the same blocks, up to another place in them."""
    case = standard_case(8)
    tables = np.tile(case.tables[case.context_lens.argmax()], (len(case.tables), 1))
    check(impl, Case(*case.arrays[:3], tables, *case.arrays[4:]), decode=True)


@every_implementation
def test_a_row_does_not_depend_on_the_others(impl):
    """Up to the order in which its chunks are summed."""
    case = standard_case(9)
    together = jitted(impl, True)(*case.decode_arrays)
    order = np.random.default_rng(9).permutation(len(case.q))
    q, k, v, tables, lens = case.decode_arrays
    shuffled = jitted(impl, True)(q[order], k, v, tables[order], lens[order])
    for x, y in zip(together, shuffled, strict=True):
        np.testing.assert_allclose(np.asarray(x)[order], y, rtol=2e-6, atol=1e-6)


@every_implementation
def test_a_row_that_turns_to_nan_leaves_the_others_alone(impl):
    """One bad request fails alone."""
    case = standard_case(9)
    q, k, v, tables, lens = case.decode_arrays
    good = jitted(impl, True)(q, k, v, tables, lens)
    bad_row = int(np.argmax(lens))
    q = np.array(q)
    q[bad_row] = np.nan
    others = np.arange(len(q)) != bad_row
    bad = jitted(impl, True)(q, k, v, tables, lens)
    assert np.isnan(np.asarray(bad[0])[bad_row]).all()
    for x, y in zip(good, bad, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[others], np.asarray(y)[others])


@every_implementation
@pytest.mark.parametrize("cut", [1, 9, 19])
def test_partial_results_combine_into_the_whole(impl, cut):
    """Contexts split after `cut` blocks, as split-KV kernels and cascades do."""
    case = standard_case(cut)
    q, k, v, tables, lens = case.decode_arrays
    slots = cut * 16
    parts = [
        (tables, np.minimum(lens, slots)),
        (np.roll(tables, -cut, axis=1), np.maximum(lens - slots, 0)),
    ]
    outs, _, lses = zip(
        *(map(np.asarray, jitted(impl, True)(q, k, v, *part)) for part in parts), strict=True
    )
    with np.errstate(invalid="ignore"):  # a row that sees nothing: -inf - -inf
        lse = np.logaddexp(*lses)
        shares = [np.nan_to_num(np.exp(part - lse))[..., None] for part in lses]
    combined = sum(share * out for share, out in zip(shares, outs, strict=True))
    wanted, _, wanted_lse = expected(case, scale=SCALE)
    np.testing.assert_allclose(combined, wanted[:, 0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse[:, 0], rtol=2e-5, atol=2e-5)


@every_implementation
def test_a_prompt_in_rows_over_its_history_agrees_with_all_at_once(impl):
    """300 tokens, of which 40 came earlier, as rows of 16 that share a table; the last unfilled."""
    rng = np.random.default_rng(10)
    T, history, total = 16, 40, 300
    whole = make_case(rng, [total], block_size=16, max_blocks=20, num_queries=total - history)
    num_rows = -(-(total - history) // T)
    q = np.zeros((num_rows * T, *whole.q.shape[2:]), np.float32)
    q[: total - history] = whole.q[0]
    starts = history + T * np.arange(num_rows, dtype=np.int32)
    rows = Case(
        q.reshape(num_rows, T, *q.shape[1:]),
        whole.k_cache,
        whole.v_cache,
        np.repeat(whole.tables, num_rows, axis=0),
        np.minimum(starts + T, total),
        starts,
    )
    out = np.asarray(jitted(impl)(*rows.arrays).out)
    assert np.isfinite(out).all(), "queries without a token are finite too"
    wanted, _, _ = expected(whole, scale=SCALE)
    flat = out.reshape(-1, *q.shape[1:])[: total - history]
    np.testing.assert_allclose(flat, wanted[0], rtol=2e-5, atol=2e-5)


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
        results.append(attend(q, *case.arrays[1:]))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_auto_is_an_implementation_and_an_unknown_name_is_refused():
    case = make_case(np.random.default_rng(0), [3], block_size=4, max_blocks=2)
    B, T, Hq, D = case.q.shape
    P, Hk, S, _ = case.k_cache.shape
    call = Call(B, T, Hq, Hk, D, S, P, 2, case.q.dtype, AttentionOptions(SCALE), target=None)
    assert resolve("auto", call) == choose(call).impl in IMPLEMENTATIONS
    assert resolve("reference", call) == "reference"
    with pytest.raises(ValueError, match=r"unknown attention 'flash'.*reference"):
        resolve("flash", call)


def wrong(name: str, replacement: np.ndarray) -> tuple[np.ndarray, ...]:
    """Good arguments of `paged_prefill_attention` but one."""
    case = make_case(np.random.default_rng(0), [3, 4], block_size=4, max_blocks=2)
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens", "query_starts")
    arguments = dict(zip(names, case.arrays, strict=True))
    return tuple((arguments | {name: replacement}).values())


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("q", np.zeros((2, 4, 16), np.float32), r"q must have 4 axes.*\(2, 4, 16\)"),
        ("q", np.zeros((2, 1, 4, 32), np.float32), "head size 32, the cache only 16"),
        ("q", np.zeros((2, 1, 3, 16), np.float32), "3 query heads are not a multiple of 2"),
        ("q", np.zeros((3, 1, 4, 16), np.float32), "has 2 rows, q has 3"),
        ("q", np.zeros((2, 1, 4, 16), np.float16), "differ in dtype: float16, float32"),
        ("v_cache", np.zeros((7, 2, 8, 16), np.float32), r"\(7, 2, 4, 16\).*\(7, 2, 8, 16\)"),
        ("k_cache", np.zeros((7, 2, 4), np.float32), r"k_cache must have 4 axes.*\(7, 2, 4\)"),
        ("block_tables", np.zeros(2, np.int32), r"block_tables must have 2 axes.*\(2,\)"),
        ("block_tables", np.zeros((2, 2), np.float32), "block_tables must be int32, got float32"),
        ("block_tables", np.zeros((1, 2), np.int32), "block_tables has 1 rows, q has 2"),
        ("context_lens", np.zeros(3, np.int32), "context_lens has 3 rows, q has 2"),
        ("context_lens", np.zeros(2, np.int16), "context_lens must be int32, got int16"),
        ("query_starts", np.zeros((2, 1), np.int32), r"query_starts must have 1 axes.*\(2, 1\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_values(name, replacement, message):
    with pytest.raises(ValueError, match=message):
        paged_prefill_attention(*wrong(name, replacement), scale=SCALE)


def test_decode_refuses_queries_with_an_axis_too_many():
    with pytest.raises(ValueError, match=r"3 axes \[B, Hq, D\], got shape \(2, 1, 4, 16\)"):
        paged_attention(*wrong("q", np.zeros((2, 1, 4, 16), np.float32))[:5], scale=SCALE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": float("nan")}, "scale must be finite, got nan"),
        ({"scale": float("inf")}, "scale must be finite, got inf"),
        ({"soft_cap": 0.0}, "soft_cap must be None or positive, got 0.0"),
        ({"soft_cap": float("nan")}, "soft_cap must be None or positive, got nan"),
        ({"sliding_window": 0}, "sliding_window must be None or >= 1, got 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    case = make_case(np.random.default_rng(0), [3, 4], block_size=4, max_blocks=2)
    with pytest.raises(ValueError, match=message):
        paged_attention(*case.decode_arrays, **{"scale": SCALE} | options)
