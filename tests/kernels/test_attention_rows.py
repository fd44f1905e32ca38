"""Rows of a batch: what they share, what they must not, and how partial results combine."""

import numpy as np
import pytest

from pallas_kernels.lab.cases import AttentionCase, make_case
from pallas_kernels.lab.float64 import attended
from tests.kernels.attention_checks import (
    ANYWHERE,
    SCALE,
    check,
    decode_arrays,
    jitted,
    standard_case,
)

anywhere = pytest.mark.parametrize("impl", ANYWHERE)


@anywhere
def test_rows_that_share_blocks_agree_with_numpy(impl):
    """Every row reads the same blocks, up to another place in them."""
    case = standard_case(8)
    tables = np.tile(case.tables[case.context_lens.argmax()], (len(case.tables), 1))
    check(impl, AttentionCase(*case[:3], tables, *case[4:]), decode=True)


@anywhere
def test_a_row_does_not_depend_on_the_others(impl):
    """Up to the order in which its chunks are summed."""
    case = standard_case(9)
    together = jitted(impl, True)(*decode_arrays(case))
    order = np.random.default_rng(9).permutation(len(case.q))
    q, k, v, tables, lens = decode_arrays(case)
    shuffled = jitted(impl, True)(q[order], k, v, tables[order], lens[order])
    for x, y in zip(together, shuffled, strict=True):
        np.testing.assert_allclose(np.asarray(x)[order], y, rtol=2e-6, atol=1e-6)


@anywhere
def test_a_row_that_turns_to_nan_leaves_the_others_alone(impl):
    """One bad request fails alone."""
    case = standard_case(9)
    q, k, v, tables, lens = decode_arrays(case)
    good = jitted(impl, True)(q, k, v, tables, lens)
    bad_row = int(np.argmax(lens))
    q = np.array(q)
    q[bad_row] = np.nan
    others = np.arange(len(q)) != bad_row
    bad = jitted(impl, True)(q, k, v, tables, lens)
    assert np.isnan(np.asarray(bad[0])[bad_row]).all()
    for x, y in zip(good, bad, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[others], np.asarray(y)[others])


@anywhere
@pytest.mark.parametrize("cut", [1, 9, 19])
def test_partial_results_combine_into_the_whole(impl, cut):
    """Contexts split after `cut` blocks, as split-KV kernels and cascades do."""
    case = standard_case(cut)
    q, k, v, tables, lens = decode_arrays(case)
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
    wanted, _, wanted_lse = attended(case, scale=SCALE)[:3]
    np.testing.assert_allclose(combined, wanted[:, 0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse[:, 0], rtol=2e-5, atol=2e-5)


@anywhere
def test_a_prompt_in_rows_over_its_history_agrees_with_all_at_once(impl):
    """300 tokens, of which 40 came earlier, as rows of 16 that share a table; the last unfilled."""
    rng = np.random.default_rng(10)
    T, history, total = 16, 40, 300
    whole = make_case(rng, [total], block_size=16, max_blocks=20, num_queries=total - history)
    num_rows = -(-(total - history) // T)
    q = np.zeros((num_rows * T, *whole.q.shape[2:]), np.float32)
    q[: total - history] = whole.q[0]
    starts = history + T * np.arange(num_rows, dtype=np.int32)
    rows = AttentionCase(
        q.reshape(num_rows, T, *q.shape[1:]),
        whole.k_cache,
        whole.v_cache,
        np.repeat(whole.tables, num_rows, axis=0),
        np.minimum(starts + T, total),
        starts,
    )
    out = np.asarray(jitted(impl)(*rows).out)
    assert np.isfinite(out).all(), "queries without a token are finite too"
    wanted, _, _ = attended(whole, scale=SCALE)[:3]
    flat = out.reshape(-1, *q.shape[1:])[: total - history]
    np.testing.assert_allclose(flat, wanted[0], rtol=2e-5, atol=2e-5)
