"""Arguments of attention that do not fit."""

import numpy as np
import pytest

from pallas_kernels.lab.cases import make_case
from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention
from tests.kernels.attention_checks import SCALE, decode_arrays


def wrong(name: str, replacement: np.ndarray) -> tuple[np.ndarray, ...]:
    """Good arguments of `paged_prefill_attention` but one."""
    case = make_case(np.random.default_rng(0), [3, 4], block_size=4, max_blocks=2)
    names = ("q", "k_cache", "v_cache", "block_tables", "context_lens", "query_starts")
    arguments = dict(zip(names, case, strict=True))
    changed = ("k_cache", "v_cache") if name == "caches" else (name,)
    return tuple((arguments | dict.fromkeys(changed, replacement)).values())


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
        (
            "block_tables",
            np.zeros((2, 2), np.float32),
            "block_tables must be int.*got float32",
        ),
        ("block_tables", np.zeros((1, 2), np.int32), "block_tables has 1 rows, q has 2"),
        ("context_lens", np.zeros(3, np.int32), "context_lens has 3 rows, q has 2"),
        ("caches", np.zeros((0, 2, 4, 16), np.float32), r"no blocks, .*\(0, 2, 4, 16\)"),
        ("context_lens", np.zeros(2, bool), "context_lens must be integers, got bool"),
        ("q", np.zeros((2, 1, 0, 16), np.float32), r"no heads.*q \(2, 1, 0, 16\)"),
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
        ({"scale": float("nan")}, "scale must be a finite float32, got nan"),
        ({"scale": float("inf")}, "scale must be a finite float32, got inf"),
        ({"scale": 1e39}, r"scale must be a finite float32, got 1e\+39"),
        ({"scale": None}, "scale must be a finite float32, got None"),
        ({"scale": "1"}, "scale must be a number, got '1'"),
        ({"scale": np.ones((2, 2))}, r"scale must be a number, got array\(.*\)$"),
        ({"soft_cap": 0.0}, "soft_cap must be None or a positive float32, got 0.0"),
        ({"soft_cap": float("nan")}, "soft_cap must be None or a positive float32, got nan"),
        ({"soft_cap": float("inf")}, "soft_cap must be None or a positive float32, got inf"),
        ({"sliding_window": 0}, r"sliding_window must be None \(all tokens\) or 1 to .*, got 0"),
        ({"sliding_window": 2**31 - 1}, "sliding_window must be .* to 1073741824, got 2147483647"),
        ({"sliding_window": 16.0}, "sliding_window must be an integer, got 16.0"),
        ({"sliding_window": True}, "sliding_window must be an integer, got True"),
        ({"detect_races": True}, "detect_races=True needs interpret=True"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    case = make_case(np.random.default_rng(0), [3, 4], block_size=4, max_blocks=2)
    with pytest.raises(ValueError, match=message):
        paged_attention(*decode_arrays(case), **{"scale": SCALE} | options)
