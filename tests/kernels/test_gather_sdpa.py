"""Gathered blocks under JAX's attention: cuDNN on a GPU, and the calls it refuses there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import targets
from pallas_kernels.lab.cases import make_case
from pallas_kernels.paged_attention import (
    AttentionOptions,
    Call,
    Unsupported,
    paged_prefill_attention,
    refusal,
)
from pallas_kernels.targets import TARGETS, compiling_for
from tests.kernels.attention_checks import SCALE


def call(dtype: str = "bfloat16", head_size: int = 128, **options) -> Call:
    return Call(
        batch=4,
        num_queries=64,
        num_heads=8,
        num_kv_heads=2,
        head_size=head_size,
        block_size=16,
        num_blocks=32,
        max_blocks=8,
        dtype=jnp.dtype(dtype),
        options=AttentionOptions(SCALE, **options),
        target=targets.current(),
    )


@pytest.mark.parametrize(
    ("target", "wrong", "reason"),
    [
        (None, {"soft_cap": 30.0}, "no soft cap"),
        (None, {"dtype": "float16"}, "no attention in float16 on a CPU"),
        (None, {"dtype": "float8_e4m3fn"}, "no attention in float8_e4m3fn on a CPU"),
        (None, {"tuning": 1}, "nothing to tune, got 1"),
        ("H200", {"soft_cap": 30.0}, "no soft cap"),
        ("H200", {"dtype": "float32"}, "bfloat16 and float16, not float32"),
        ("H200", {"head_size": 100}, "up to 256 in steps of 8, not 100"),
        ("A100", {"head_size": 256}, "A100 takes head sizes up to 128 in steps of 8, not 256"),
    ],
)
def test_what_jax_or_cudnn_cannot_do_is_refused(target, wrong, reason):
    if target is None:
        assert reason in refusal("gather_sdpa", call(**wrong))
    else:
        with compiling_for(TARGETS[target]):
            assert reason in refusal("gather_sdpa", call(**wrong))


@pytest.mark.parametrize(
    ("target", "dtype", "head_size"),
    [("A100", "bfloat16", 128), ("H200", "float16", 256), ("B200", "bfloat16", 80)],
)
def test_what_cudnn_can_do_is_taken(target, dtype, head_size):
    with compiling_for(TARGETS[target]):
        assert refusal("gather_sdpa", call(dtype, head_size, sliding_window=100)) is None


def attend(*arrays):
    return paged_prefill_attention(*arrays, scale=SCALE, impl="gather_sdpa")


def arrays(dtype):
    case = make_case(
        np.random.default_rng(0), [40, 9], block_size=4, max_blocks=10, num_queries=2, dtype=dtype
    )
    return [jnp.asarray(x) for x in case]


@pytest.mark.parametrize("target", [None, "H200"])
def test_the_target_decides_between_xla_and_cudnn(monkeypatch, target):
    """cuDNN is not here: only the request for it can be seen."""
    requested = []

    def dot_product_attention(query, key, value, *, implementation, **_):
        requested.append(implementation)
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    if target is None:
        attend(*arrays(jnp.bfloat16))
        assert requested == ["xla"]
    else:
        with compiling_for(TARGETS[target]):
            attend(*arrays(jnp.bfloat16))
        assert requested == ["cudnn"]


def test_a_cudnn_that_is_missing_is_named(monkeypatch):
    def dot_product_attention(*_, **__):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    with (
        compiling_for(TARGETS["H200"]),
        pytest.raises(Unsupported, match="'gather_sdpa' cannot do this: cuDNN is not detected"),
    ):
        attend(*arrays(jnp.bfloat16))


def test_statistics_that_nobody_uses_cost_no_product(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, *_, **__: query)

    def compiled(f) -> str:
        return jax.jit(f).lower(*arrays(np.float32)).compile().as_text()

    assert " dot(" in compiled(attend)
    assert " dot(" not in compiled(lambda *arrays: attend(*arrays).out)
