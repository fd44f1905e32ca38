"""The implementation of attention that does a call, and the reasons why others do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import targets
from pallas_kernels.lab import aot
from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    AttentionOptions,
    Call,
    Unsupported,
    cache_head_size,
    choose,
    paged_attention,
    paged_prefill_attention,
    resolve,
)
from pallas_kernels.paged_attention.triton import TritonTuning
from pallas_kernels.targets import TARGETS, compiling_for
from tests.kernels.attention_checks import SCALE

lowers_triton = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


def call(
    *, num_queries: int = 1, block_size: int = 16, head_size: int = 128, dtype="bfloat16", **options
) -> Call:
    """A call for the GPU at hand, or the one that is compiled for."""
    return Call(
        batch=4,
        num_queries=num_queries,
        num_heads=8,
        num_kv_heads=2,
        head_size=head_size,
        block_size=block_size,
        num_blocks=32,
        max_blocks=8,
        dtype=jnp.dtype(dtype),
        options=AttentionOptions(SCALE, **options),
        target=targets.current(),
    )


@pytest.mark.parametrize("num_queries", [1, 32])
def test_auto_without_a_gpu_is_xla_and_says_why(num_queries):
    choice = choose(call(num_queries=num_queries))
    assert choice.impl == "xla"
    assert choice.refusals == dict.fromkeys(("mosaic_gpu", "triton"), "it needs an NVIDIA GPU")


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("num_queries", [1, 32])
def test_auto_on_a_gpu_is_mosaic(target, num_queries):
    with compiling_for(target):
        assert choose(call(num_queries=num_queries)) == ("mosaic_gpu", {})


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("num_queries", [1, 32])
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"block_size": 4}, "multiple of 8"),
        ({"block_size": 12}, "multiple of 8"),
        ({"head_size": 80}, "head size"),
        ({"dtype": "float32"}, "float32"),
    ],
    ids=str,
)
def test_auto_on_a_gpu_is_triton_for_what_mosaic_rejects(target, num_queries, shape, reason):
    with compiling_for(target):
        rejected = call(num_queries=num_queries, **shape)
        choice = choose(rejected)
        assert choice.impl == "triton"
        assert reason in choice.refusals["mosaic_gpu"]
        assert str(choice) == f"triton; mosaic_gpu: {choice.refusals['mosaic_gpu']}"
        with pytest.raises(Unsupported, match=r"'mosaic_gpu' cannot do this.*" + reason):
            resolve("mosaic_gpu", rejected)


@pytest.mark.parametrize("head_size", [80, 96])
def test_auto_is_mosaic_for_a_cache_that_may_still_be_widened(head_size):
    with compiling_for(TARGETS["H200"]):
        assert choose(call(head_size=head_size), widen=True).impl == "mosaic_gpu"
        assert resolve("mosaic_gpu", call(head_size=head_size), widen=True) == "mosaic_gpu"
        assert choose(call(head_size=head_size, block_size=4), widen=True).impl == "triton"


def test_auto_on_a_gpu_is_xla_for_what_both_kernels_reject():
    with compiling_for(TARGETS["H200"]):
        choice = choose(call(head_size=320))
    assert choice.impl == "xla"
    assert list(choice.refusals) == ["mosaic_gpu", "triton"]


def test_auto_interprets_the_kernel_of_a_gpu_if_asked():
    assert choose(call(interpret=True)).impl == "mosaic_gpu"
    assert choose(call(interpret=True, block_size=4)).impl == "triton"


@lowers_triton
@pytest.mark.parametrize(
    ("block_size", "kernels"), [(16, ["mosaic"]), (4, ["triton"])], ids=["16", "4"]
)
def test_what_auto_picks_is_what_runs(block_size, kernels):
    cache = jax.ShapeDtypeStruct((32, 2, block_size, 128), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    shapes = (
        jax.ShapeDtypeStruct((4, 1, 8, 128), jnp.bfloat16),
        cache,
        cache,
        jax.ShapeDtypeStruct((4, 8), jnp.int32),
        rows,
        rows,
    )

    def attend(*arrays):
        return paged_prefill_attention(*arrays, scale=SCALE)

    lowered = aot.lower(attend, shapes, TARGETS["H200"])
    assert [kernel.backend for kernel in lowered] == kernels


@pytest.mark.parametrize("impl", ["mosaic_gpu", "triton"])
def test_a_kernel_named_without_a_gpu_is_refused_with_what_to_do(impl):
    with pytest.raises(Unsupported, match=f"'{impl}'.*NVIDIA GPU; interpret=True"):
        resolve(impl, call())


def test_a_name_is_what_it_says_or_unknown():
    assert resolve("reference", call()) == "reference"
    assert resolve("auto", call()) in IMPLEMENTATIONS
    with pytest.raises(ValueError, match=r"unknown attention 'flash'.*reference"):
        resolve("flash", call())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Tritn",
            r"unknown attention 'Tritn' \(did you mean 'triton'\?\); choose one of auto, ref",
        ),
        (".triton", r"unknown attention '.triton' \(did you mean 'triton'\?\)"),
        (None, "attention must be an implementation's name, got None"),
        (["xla"], r"attention must be an implementation's name, got \['xla'\]"),
    ],
)
def test_what_names_no_implementation_is_refused_with_those_there_are(name, message):
    with pytest.raises(ValueError, match=message):
        resolve(name, call())


def test_a_module_without_the_op_is_named():
    q, cache, rows = np.ones((1, 1, 8)), np.ones((2, 1, 4, 8)), np.ones((1, 1), int)
    with pytest.raises(ValueError, match=r"attention 'os.path' has no function 'attend'"):
        paged_attention(q, cache, cache, rows, rows[0], scale=1, impl="os.path")


def test_auto_is_the_name_of_no_implementation():
    with pytest.raises(ValueError, match="attention 'auto' is no implementation"):
        cache_head_size("auto", 80)


@pytest.mark.parametrize("impl", ["auto", "reference", "xla", "gather_sdpa", "mosaic_gpu"])
def test_tuning_of_another_implementation_is_refused(impl):
    tuning = TritonTuning(block_kv=32, block_rows=16)
    with compiling_for(TARGETS["H200"]), pytest.raises(ValueError, match=r"tun.*TritonTuning"):
        resolve(impl, call(tuning=tuning))
