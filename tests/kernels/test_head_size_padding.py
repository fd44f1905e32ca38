"""A cache wider than the model's head size, as kernels with tiles of powers of two want it."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.lab.cases import AttentionCase, make_case
from pallas_kernels.lab.float64 import attended
from pallas_kernels.paged_attention import IMPLEMENTATIONS, cache_head_size
from tests.kernels.attention_checks import jitted


def padded(case: AttentionCase, width: int) -> AttentionCase:
    """The case over a cache of `width` lanes, zero beyond its head size."""
    pad = ((0, 0), (0, 0), (0, 0), (0, width - case.q.shape[-1]))
    k_cache, v_cache = (np.pad(cache, pad) for cache in (case.k_cache, case.v_cache))
    return AttentionCase(case.q, k_cache, v_cache, *case[3:])


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("head_size", [80, 96])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_cache_of_128_lanes_serves_smaller_heads(impl, head_size, num_queries):
    case = make_case(
        np.random.default_rng(head_size),
        [0, 1, 16, 50],
        block_size=16,
        max_blocks=4,
        num_queries=num_queries,
        head_dim=head_size,
        dtype=ml_dtypes.bfloat16,
    )
    scale = head_size**-0.5
    attend = jitted(impl, scale=scale, interpret=True)
    results = attend(*padded(case, 128))
    for actual, wanted in zip(results, attended(case, scale=scale)[:3], strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("impl", "widths"),
    [
        ("reference", [16, 64, 80, 96, 128, 256]),
        ("xla", [16, 64, 80, 96, 128, 256]),
        ("gather_sdpa", [16, 64, 80, 96, 128, 256]),
        ("triton", [16, 64, 80, 96, 128, 256]),
        ("mosaic_gpu", [64, 64, 128, 128, 128, 256]),
    ],
)
def test_a_kernel_says_how_wide_its_cache_is(impl, widths):
    assert [cache_head_size(impl, size) for size in (16, 64, 80, 96, 128, 256)] == widths
