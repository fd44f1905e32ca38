"""The lab's inputs hold the traps they promise; its reference and its tolerances are right."""

import re
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.lab import attention
from pallas_kernels.lab.cases import UNUSED_ENTRIES, AttentionCase, Tables, make_case
from pallas_kernels.lab.float64 import attended, bounds
from pallas_kernels.lab.wanted import Wanted, compare

CONTEXTS = [0, 1, 8, 30, 40]
every_kind_of_table = pytest.mark.parametrize("tables", get_args(Tables))


def small_case(seed: int = 0, **options) -> AttentionCase:
    options = {"block_size": 8, "max_blocks": 5} | options
    return make_case(np.random.default_rng(seed), CONTEXTS, **options)


def used_entries(case: AttentionCase) -> np.ndarray:
    """Which entries of the tables name a block, bool[B, M]."""
    S, M = case.k_cache.shape[2], case.tables.shape[1]
    return np.arange(M) * S < case.context_lens[:, None]


@every_kind_of_table
def test_what_no_row_uses_is_nan_and_what_is_beyond_a_context_leads_nowhere(tables):
    case = small_case(tables=tables)
    P, _, S, _ = case.k_cache.shape
    used = used_entries(case)
    assert set(case.tables[~used]) == set(UNUSED_ENTRIES)
    assert case.tables[used].min() >= 1
    assert case.tables[used].max() < P
    written = np.zeros((P, S), bool)
    for row, context in zip(case.tables, case.context_lens, strict=True):
        slots = np.arange(context)
        written[row[slots // S], slots % S] = True
    assert not written[0].any()
    for cache in (case.k_cache, case.v_cache):
        finite = np.isfinite(cache)
        assert (finite.all(axis=(1, 3)) == written).all()
        assert (finite.any(axis=(1, 3)) == written).all()


def test_kinds_of_tables_differ_in_which_blocks_rows_have():
    cases = {kind: small_case(tables=kind) for kind in get_args(Tables)}
    for kind in ("random", "permuted"):
        entries = cases[kind].tables[used_entries(cases[kind])]
        assert len(set(entries)) == len(entries), "no block is in two rows"
    *_, second_longest, longest = cases["permuted"].tables
    assert set(longest) == set(range(21, 26)), "a row's blocks are neighbours"
    assert list(longest) != sorted(longest)
    *_, second_longest, longest = cases["shared"].tables
    np.testing.assert_array_equal(second_longest[:3], longest[:3])
    assert second_longest[3] != longest[3], "a block that is not full is the row's own"
    *_, second_longest, longest = cases["repeated"].tables
    assert len(set(longest)) == 1
    assert len(set(second_longest[:3])) == 1
    assert second_longest[3] != second_longest[2]


def test_an_unknown_kind_of_table_is_refused():
    with pytest.raises(ValueError, match=r"random, permuted, shared, repeated, got 'sorted'"):
        small_case(tables="sorted")


@pytest.mark.parametrize("spec", attention.VALUE_SPECS, ids=lambda spec: spec.name)
def test_every_value_case_has_an_empty_context_one_token_a_full_block_and_a_full_table(spec):
    case = attention.make(spec, np.random.default_rng(0))
    assert case.q.dtype == spec.dtype
    edges = {0, 1, spec.block_size, spec.block_size * spec.max_blocks}
    assert edges <= set(case.context_lens)
    assert (case.query_starts >= 0).all()


def test_fresh_seeds_give_fresh_cases():
    spec = attention.VALUE_SPECS[0]
    first, same, other = (attention.make(spec, np.random.default_rng(n)) for n in (1, 1, 2))
    for a, b in zip(first, same, strict=True):
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
    assert (first.q != other.q).any()
    assert set(first.context_lens) != set(other.context_lens)


def by_definition(case, row, query, head, scale, soft_cap, window):
    """(out, max, log-sum-exp) of one query, token by token."""
    position, S = case.query_starts[row] + query, case.k_cache.shape[2]
    kv_head = head // (case.q.shape[2] // case.k_cache.shape[1])
    scores, values = [], []
    for slot in range(case.context_lens[row]):
        if slot <= position and (window is None or slot > position - window):
            at = (case.tables[row, slot // S], kv_head, slot % S)
            score = scale * float(np.dot(case.q[row, query, head], case.k_cache[at]))
            scores.append(score if soft_cap is None else soft_cap * np.tanh(score / soft_cap))
            values.append(case.v_cache[at])
    if not scores:
        return np.zeros(case.q.shape[-1]), -np.inf, -np.inf
    weights = np.exp(scores)
    return weights @ np.array(values) / weights.sum(), max(scores), np.log(weights.sum())


@pytest.mark.parametrize(
    ("soft_cap", "sliding_window"), [(None, None), (2.0, None), (None, 5), (30.0, 12)]
)
def test_the_reference_is_attention_by_its_definition(soft_cap, sliding_window):
    starts = [0, 0, 3, 27, 10]
    case = small_case(num_queries=3, query_starts=starts, dtype=np.float64, num_heads=6)
    out, top, lse = attended(case, scale=0.3, soft_cap=soft_cap, sliding_window=sliding_window)[:3]
    for at in np.ndindex(top.shape):
        wanted = by_definition(case, *at, 0.3, soft_cap, sliding_window)
        for actual, value in zip((out[at], top[at], lse[at]), wanted, strict=True):
            np.testing.assert_allclose(actual, value, rtol=1e-12, atol=1e-12)


def rounded_attention(case: AttentionCase, scale: float) -> list[np.ndarray]:
    """Attention as a kernel does it: float32 sums, weights rounded, then the output."""
    B, T, Hq, D = case.q.shape
    _, Hk, S, _ = case.k_cache.shape
    out = np.zeros((B, T, Hq, D), case.q.dtype)
    top, lse = (np.full((B, T, Hq), -np.inf, np.float32) for _ in "ml")
    for b, context in enumerate(case.context_lens):
        slots = np.arange(context)
        blocks = case.tables[b, slots // S]
        for h in range(Hq if context else 0):
            keys, values = (
                cache[blocks, h * Hk // Hq, slots % S] for cache in (case.k_cache, case.v_cache)
            )
            scores = keys.astype(np.float32) @ case.q[b, 0, h].astype(np.float32)
            scores *= np.float32(scale)
            top[b, 0, h] = scores.max()
            weights = np.exp(scores - top[b, 0, h])
            lse[b, 0, h] = top[b, 0, h] + np.log(weights.sum())
            narrow = weights.astype(case.q.dtype).astype(np.float32)
            out[b, 0, h] = narrow @ values.astype(np.float32) / weights.sum()
    return [out, top, lse]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([ml_dtypes.bfloat16, np.float16, np.float32]),
    size=st.sampled_from([0.1, 1.0, 8.0]),
)
def test_rounding_stays_within_the_bounds_and_a_fault_does_not(seed, dtype, size):
    case = small_case(seed, dtype=dtype, head_dim=64)
    case = AttentionCase((case.q * dtype(size)).astype(dtype), *case[1:])
    result = attended(case, scale=0.125)
    limits = bounds(result, dtype, largest_value=6.0)
    rounded = rounded_attention(case, 0.125)
    # A kernel that leaves out the last of 30 or 40 tokens is found out in every dtype.
    lens = case.context_lens - (case.context_lens > 8)
    short = AttentionCase(*case[:4], lens.astype(np.int32), case.query_starts)
    faulty = rounded_attention(short, 0.125)
    for name, good, bad, value, limit in zip(
        limits._fields, rounded, faulty, result[:3], limits, strict=True
    ):
        wanted = Wanted(value, limit, good.dtype)
        assert not compare(name, good, wanted).fault
        # The token need not have the largest score; where few tokens weigh, it may weigh nothing.
        if name != "max" and size <= 1:
            assert compare(name, bad, wanted).fault


def test_bounds_are_not_far_above_the_errors():
    """A bound that is never neared finds nothing: bfloat16's worst entry is within a fifth."""
    case = small_case(dtype=ml_dtypes.bfloat16, head_dim=64)
    result = attended(case, scale=0.125)
    limits = bounds(result, ml_dtypes.bfloat16, largest_value=6.0)
    wanted = Wanted(result.out, limits.out, np.dtype(ml_dtypes.bfloat16))
    assert 0.2 < compare("out", rounded_attention(case, 0.125)[0], wanted).excess < 1


def test_on_a_gpu_float32_is_allowed_the_rounding_of_its_products_to_tf32():
    result = attended(small_case(), scale=0.25)
    here, there = (
        bounds(result, np.float32, largest_value=6.0, soft_cap=30.0, on_gpu=on_gpu)
        for on_gpu in (False, True)
    )
    seeing = result.num_keys[..., 0] > 0
    assert (there.out > 10 * here.out)[seeing].all()
    assert (there.max > 10 * here.max)[seeing].all()


WANTED = Wanted(np.array([1.0, -np.inf, np.nan, 0.0]), np.array([0.1, 0, 0, 0]), np.dtype("f4"))


@pytest.mark.parametrize(
    ("actual", "fault"),
    [
        ([1.05, -np.inf, np.nan, 0], ""),
        ([1.2, -np.inf, np.nan, 0], r"x\[0\] is 1.2, must be 1 to within 0.1; 1 of 4 entries"),
        ([1, 0, np.nan, 0], r"x\[1\] is 0, must be -inf"),
        ([1, np.inf, np.nan, 0], r"x\[1\] is inf, must be -inf"),
        ([1, -np.inf, 3, 0], r"x\[2\] is 3, must be nan"),
        ([1, -np.inf, np.nan, np.nan], r"x\[3\] is nan, must be 0"),
        ([1, -np.inf, np.nan, 1e-30], r"x\[3\] is 1e-30, must be 0 to within 0"),
        ([1, -np.inf, np.nan], r"x is float32\[3\], must be float32\[4\]"),
    ],
)
def test_a_comparison_names_the_entry_that_is_furthest_off(actual, fault):
    difference = compare("x", np.array(actual, np.float32), WANTED)
    if fault:
        assert re.search(fault, difference.fault)
        assert difference.excess > 1
    else:
        assert not difference.fault
        assert difference.error == pytest.approx(0.05)
        assert difference.bound == 0.1


def test_another_dtype_is_a_fault():
    assert compare("x", np.zeros(4, np.float16), WANTED).fault == (
        "x is float16[4], must be float32[4]"
    )
