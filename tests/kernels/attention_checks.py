"""What the tests of attention share: calls compiled once, and their comparison with float64."""

from collections.abc import Sequence
from functools import cache, partial

import jax
import numpy as np

from pallas_kernels.lab.cases import AttentionCase, make_case
from pallas_kernels.lab.float64 import attended
from pallas_kernels.paged_attention import paged_attention, paged_prefill_attention

SCALE = 16**-0.5
# Implementations that run on any device.
ANYWHERE = ("reference", "xla", "gather_sdpa")


def decode_arrays(case: AttentionCase) -> tuple[np.ndarray, ...]:
    """Arguments of `paged_attention`: the first query of each row."""
    return case.q[:, 0], case.k_cache, case.v_cache, case.tables, case.context_lens


@cache
def jitted(impl: str, decode: bool = False, **options):
    """One function per choice of options, so that tests of equal shapes share a compilation."""
    options = {"scale": SCALE, "impl": impl} | options
    if decode:
        return jax.jit(partial(paged_attention, return_residuals=True, **options))
    return jax.jit(partial(paged_prefill_attention, **options))


def check(
    impl: str,
    case: AttentionCase,
    *,
    decode: bool = False,
    tolerance: float = 2e-5,
    interpret: bool = False,
    tuning: object = None,
    **options,
) -> Sequence[jax.Array]:
    """Output and softmax statistics agree with numpy, and no NaN shows."""
    attend = jitted(impl, decode, interpret=interpret, tuning=tuning, **options)
    results = attend(*(decode_arrays(case) if decode else case))
    if decode:
        results = [x[:, None] for x in results]
    for name, actual, wanted in zip(
        ("out", "max", "lse"),
        results,
        attended(case, **{"scale": SCALE} | options)[:3],
        strict=True,
    ):
        actual = np.asarray(actual, np.float64)
        np.testing.assert_allclose(
            actual, wanted, rtol=tolerance, atol=tolerance, err_msg=f"{name} of {impl}"
        )
    return results


def contexts_for(rng: np.random.Generator, block_size: int, max_blocks: int) -> list[int]:
    """Contexts of 11 rows: empty, one token, around a block's and the table's size, and others."""
    longest = block_size * max_blocks
    edges = [0, 1, block_size - 1, block_size, block_size + 1, longest, longest - 1]
    others = rng.integers(1, longest, 4).tolist()
    return rng.permutation([min(max(context, 0), longest) for context in edges + others]).tolist()


def standard_case(seed: int) -> AttentionCase:
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
