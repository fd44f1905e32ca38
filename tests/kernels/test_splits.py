"""Splits of a context combine into what the whole gives."""

import numpy as np

from pallas_kernels.paged_attention.splits import LOWEST, combine_finished, combine_splits


def partial(scores, values, seen):
    """(out, top, total) of the keys that are seen, as a program leaves them."""
    if not seen.any():
        return np.full(values.shape[1], 0.0), LOWEST, 0.0
    top = scores[seen].max()
    weights = np.exp(scores[seen] - top)
    return weights @ values[seen], top, weights.sum()


def combined(splits):
    """(output, largest score, log-sum-exp) of `splits` of one query head of one row."""
    arrays = (np.array(x, np.float32) for x in zip(*splits, strict=True))
    out, top, total = (x[:, None, None, None] for x in arrays)
    return [np.asarray(x)[0, 0, 0] for x in combine_splits(out, top, total, np.float32)]


def test_splits_of_any_size_and_scale_combine_into_the_whole():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal(50) * np.where(np.arange(50) < 20, 1, 1000)
    values = rng.standard_normal((50, 8))
    ends = [(0, 1), (1, 20), (20, 20), (20, 50)]  # one of them empty
    at = np.arange(50)
    out, top, lse = combined(partial(scores, values, (a <= at) & (at < b)) for a, b in ends)
    whole, largest, total = partial(scores, values, at < 50)
    np.testing.assert_allclose(out, whole / total, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(top, largest, rtol=1e-6)
    np.testing.assert_allclose(lse, largest + np.log(total), rtol=1e-6)


def test_splits_that_see_nothing_give_zeros_and_minus_infinity():
    nothing = np.zeros(8), LOWEST, 0.0
    out, top, lse = combined([nothing, (np.zeros(8), -np.inf, 0.0)])
    np.testing.assert_array_equal(out, 0)
    assert top == lse == -np.inf


def finished(scores, values, seen):
    """(out, top, lse) of the keys that are seen, as a program leaves them that divides."""
    out, top, total = partial(scores, values, seen)
    return out / (total or 1), top, top + np.log(total) if total else LOWEST


def test_finished_splits_combine_into_the_whole():
    rng = np.random.default_rng(1)
    scores = rng.standard_normal(50) * np.where(np.arange(50) < 20, 1, 100)
    values = rng.standard_normal((50, 8))
    at, ends = np.arange(50), [(0, 1), (1, 20), (20, 20), (20, 50)]  # one of them empty
    splits = [finished(scores, values, (a <= at) & (at < b)) for a, b in ends]
    rows = splits, [(np.zeros(8), LOWEST, LOWEST)] * len(ends)  # one that sees nothing, too
    out, top, lse = (
        np.array([[split[i] for split in row] for row in rows], np.float32) for i in range(3)
    )
    result = combine_finished(out, top, lse, np.float32)
    whole, largest, whole_lse = finished(scores, values, at < 50)
    np.testing.assert_allclose(result.out, [whole, np.zeros(8)], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.max, [largest, -np.inf], rtol=1e-6)
    np.testing.assert_allclose(result.lse, [whole_lse, -np.inf], rtol=1e-6)
    # One split is the whole.
    alone = combine_finished(out[..., 3:, :], top[..., 3:], lse[..., 3:], np.float32)
    np.testing.assert_array_equal(alone.out, out[:, 3])
