"""Derivatives of attention: against float64 differences, and refused by kernels without any."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import block_copy
from pallas_kernels.kv_write import write_kv
from pallas_kernels.lab.cases import AttentionCase, make_case
from pallas_kernels.lab.float64 import attended
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Unsupported,
    paged_prefill_attention,
)
from pallas_kernels.paged_attention.mosaic_gpu.contiguous import contiguous_attention

# Rows that see nothing, part of their context, and all of it; what is unused holds NaN.
CASE = make_case(
    np.random.default_rng(0),
    [0, 3, 8, 21],
    block_size=4,
    max_blocks=6,
    num_queries=3,
    query_starts=[0, 1, 5, 18],
)
OPTIONS = [{}, {"sliding_window": 7}, {"sliding_window": 7, "soft_cap": 2.0}]


def weighted_sum(results, xp):
    """Of all results, by weights that are always the same; what is infinite is left out."""
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal(x.shape) for x in results]
    return sum(
        xp.sum(xp.where(xp.isfinite(x), x, 0) * w) for x, w in zip(results, weights, strict=True)
    )


def loss(q, k_cache, v_cache, *, impl, **options):
    arrays = (q, k_cache, v_cache, *CASE[3:])
    return weighted_sum(paged_prefill_attention(*arrays, scale=0.3, impl=impl, **options), jnp)


def difference(directions, **options):
    """The derivative along a direction of q and the caches, of float64 attention."""
    values = []
    for step in (1e-5, -1e-5):
        moved = (
            np.float64(x) + step * direction
            for x, direction in zip(CASE[:3], directions, strict=True)
        )
        results = attended(AttentionCase(*moved, *CASE[3:]), scale=0.3, **options)[:3]
        values.append(weighted_sum(results, np))
    return (values[0] - values[1]) / 2e-5


@pytest.mark.parametrize(
    ("impl", "options"),
    [
        (impl, options)
        for impl in ("reference", "xla", "gather_sdpa")
        for options in OPTIONS
        if not (impl == "gather_sdpa" and "soft_cap" in options)  # it has none
    ],
    ids=str,
)
def test_derivatives_agree_with_differences_in_float64(impl, options):
    f = partial(loss, impl=impl, **options)
    gradients = jax.jit(jax.grad(f, (0, 1, 2)))(*CASE[:3])
    rng = np.random.default_rng(2)
    directions = [np.where(np.isnan(x), 0, rng.standard_normal(x.shape)) for x in CASE[:3]]
    for i, gradient in enumerate(gradients):
        assert np.isfinite(gradient).all()
        only = [x if i == j else np.zeros_like(x) for j, x in enumerate(directions)]
        wanted = difference(only, **options)
        np.testing.assert_allclose(np.sum(gradient * directions[i]), wanted, rtol=1e-4, atol=1e-4)
    _, forward = jax.jvp(f, tuple(CASE[:3]), tuple(np.float32(x) for x in directions))
    np.testing.assert_allclose(forward, difference(directions, **options), rtol=1e-4, atol=1e-4)


def test_the_gradient_of_rows_of_a_batch_may_be_mapped():
    queries = np.stack([CASE.q, 2 * CASE.q])
    gradient = jax.jit(jax.grad(partial(loss, impl="xla")))
    together = jax.jit(jax.vmap(gradient, (0, None, None)))(queries, *CASE[1:3])
    for q, mapped in zip(queries, together, strict=True):
        np.testing.assert_allclose(mapped, gradient(q, *CASE[1:3]), rtol=1e-5, atol=1e-5)


NO_DERIVATIVES = r"^a Pallas (Triton|Mosaic GPU) kernel has no derivatives; .*'reference' or 'xla'"


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("impl", ["triton", "mosaic_gpu", "mosaic_gpu_wgmma"])
def test_a_kernel_without_derivatives_names_what_has_them(impl, transform):
    rng = np.random.default_rng(0)
    case = make_case(rng, [3], block_size=8, max_blocks=2, head_dim=64, dtype=ml_dtypes.bfloat16)

    def f(q):
        arrays = (q, *case[1:])
        return jnp.sum(paged_prefill_attention(*arrays, scale=1, impl=impl, interpret=True).lse)

    with pytest.raises(Unsupported, match=NO_DERIVATIVES):
        jax.grad(transform(f))(case.q)


def test_so_do_kernels_over_contiguous_caches_and_kernels_that_move():
    cache, new = jnp.ones((3, 2, 64, 64), jnp.bfloat16), jnp.ones((1, 2, 64), jnp.bfloat16)
    kernel = {"impl": "mosaic_gpu", "interpret": True}

    def contiguous(k):
        options = AttentionOptions(1, interpret=True)
        return contiguous_attention(
            jnp.ones_like(k[:, :1]), k, k, [1] * 3, [0] * 3, options=options
        )

    for f in (
        contiguous,
        lambda cache: write_kv(cache, cache, new, new, [65], **kernel),
        lambda cache: block_copy.copy_blocks([cache], [1], [2], **kernel),
        lambda cache: block_copy.read_blocks([cache], [1], **kernel),
        lambda cache: block_copy.write_blocks([cache], cache[:1, None], [1], **kernel),
    ):
        with pytest.raises(Unsupported, match=NO_DERIVATIVES):
            jax.jvp(f, (cache,), (cache,))
