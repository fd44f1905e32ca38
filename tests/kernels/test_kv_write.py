"""Writing keys and values into their slots: which slots every implementation touches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import IMPLEMENTATIONS, write_kv
from pallas_kernels.lab import aot
from pallas_kernels.lab.interpreter import Race, watch
from pallas_kernels.registry import Unsupported
from pallas_kernels.targets import TARGETS, compiling_for
from tests.compiler import needs_compiler

# [P, Hk, S, D]: a warp's worth of rows, and too few elements to occupy a warpgroup.
SHAPES = [(6, 8, 16, 128), (7, 3, 4, 64), (5, 1, 1, 80)]
DTYPES = ["float32", "bfloat16", "float16"]


def random(rng, shape, dtype) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def written(impl, caches, new, slots) -> list[np.ndarray]:
    """By the implementation; a kernel is interpreted and watched for races."""

    @jax.jit
    def write(caches, new, slots):
        return write_kv(*caches, *new, slots, impl=impl, interpret=True, detect_races=True)

    watched = watch(lambda: jax.block_until_ready(write(caches, new, slots)))
    assert watched.looked_for_races == (impl == "mosaic_gpu")
    return [np.asarray(cache) for cache in watched.result]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, DTYPES, strict=True)), ids=str)
def test_a_write_changes_its_slots_alone(impl, shape, dtype):
    P, Hk, S, D = shape
    rng = np.random.default_rng(0)
    caches = [random(rng, shape, dtype) for _ in "kv"]
    new = [random(rng, (4, Hk, D), dtype) for _ in "kv"]
    slots = rng.choice(np.arange(S, P * S, dtype=np.int32), 4, replace=False)
    for cache, rows, after in zip(caches, new, written(impl, caches, new, slots), strict=True):
        cache[slots // S, :, slots % S] = rows
        np.testing.assert_array_equal(after, cache)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_padded_tokens_meet_in_the_null_block(impl):
    rng = np.random.default_rng(1)
    caches = [random(rng, (4, 2, 4, 64), "float32") for _ in "kv"]
    new = [np.full((4, 2, 64), np.nan, np.float32) for _ in "kv"]
    for rows in new:
        rows[1] = 7
    slots = np.array([0, 9, 0, 3], np.int32)
    for cache, after in zip(caches, written(impl, caches, new, slots), strict=True):
        cache[2, :, 1] = 7
        np.testing.assert_array_equal(after[1:], cache[1:])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_one_token_of_another_dtype_and_a_narrower_head(impl):
    """The contents of a padded cache of a smaller type: zeros in the lanes beyond the head."""
    rng = np.random.default_rng(2)
    caches = [np.full((3, 2, 8, 128), np.nan, jnp.bfloat16) for _ in "kv"]
    new = [random(rng, (1, 2, 96), "float32") for _ in "kv"]
    after = written(impl, caches, new, np.array([13], np.int32))
    for cache, rows in zip(after, new, strict=True):
        np.testing.assert_array_equal(cache[1, :, 5, :96], rows[0].astype(jnp.bfloat16))
        np.testing.assert_array_equal(cache[1, :, 5, 96:].astype(np.float32), 0)
        assert np.isnan(cache.astype(np.float32)).sum() == cache.size - 2 * 128


def test_two_tokens_in_one_slot_are_a_race():
    """So that the tests above can find one."""
    caches = [np.zeros((3, 2, 8, 64), np.float32) for _ in "kv"]
    new = [np.ones((2, 2, 64), np.float32) for _ in "kv"]
    with pytest.raises(Race, match="write"):
        written("mosaic_gpu", caches, new, np.array([9, 9], np.int32))


def shaped(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments(num_tokens: int, P: int, Hk: int, S: int, D: int, dtype="bfloat16"):
    cache, new = shaped(P, Hk, S, D, dtype=dtype), shaped(num_tokens, Hk, D, dtype=dtype)
    return cache, cache, new, new, shaped(num_tokens, dtype="int32")


def mosaic(*args):
    return write_kv(*args, impl="mosaic_gpu")


@pytest.mark.parametrize(
    ("Hk", "S", "D", "dtype", "target"),
    [
        (1, 1, 64, "bfloat16", "A100"),
        (3, 16, 64, "float32", "L4"),
        (8, 16, 128, "bfloat16", "B200"),
        (40, 256, 128, "float16", "H200"),
        (2, 4, 80, "bfloat16", "H200"),
        (2, 16, 96, "float16", "A100"),
        (4, 8, 256, "float32", "B200"),
    ],
)
def test_every_shape_lowers(Hk, S, D, dtype, target):
    [call] = aot.lower(mosaic, arguments(5, 9, Hk, S, D, dtype), TARGETS[target])
    assert call.grid == (5, 1, 1)


@needs_compiler
@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_compiled_it_moves_16_bytes_at_a_time_and_needs_few_registers(target):
    args = arguments(64, 1000, 8, 16, 128)
    [kernel] = aot.compile(mosaic, args, target).kernels
    assert kernel.spills == kernel.stack == 0
    assert kernel.registers <= 40
    assert len(re.findall(r"\bld(\.global)?\.v4\.b32", kernel.ptx)) == 2
    assert len(re.findall(r"\bst(\.global)?\.v4\.b32", kernel.ptx)) == 2


@needs_compiler
def test_caches_of_more_than_2_to_the_31_elements_are_addressed_with_64_bits():
    P, Hk, S, D = 500_000, 3, 16, 128
    args = arguments(4, P, Hk, S, D)
    assert P * Hk * S * D > 2**31
    [kernel] = aot.compile(mosaic, args, TARGETS["H200"]).kernels
    # The block times its bytes, for either cache.
    assert re.search(rf"mul\.wide\.s32\s+%rd\d+, %r\d+, {Hk * S * D * 2};", kernel.ptx)


def test_the_kernel_writes_into_the_caches_it_is_given():
    step = jax.jit(lambda *args: mosaic(*args), donate_argnums=(0, 1))
    with compiling_for(TARGETS["H200"]):
        traced = step.trace(*arguments(2, 3, 2, 8, 64))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    aliases = re.findall(r"output_tuple_indices = \[(\d)\],\s*operand_index = (\d)", text)
    assert aliases == [("0", "3"), ("1", "4")], "after k, v and slots"


def test_without_a_gpu_the_kernel_refuses():
    with pytest.raises(Unsupported, match=r"kv_write 'mosaic_gpu' .* needs an NVIDIA GPU"):
        mosaic(*(jnp.zeros(x.shape, x.dtype) for x in arguments(2, 3, 2, 8, 64)))
    with pytest.raises(Unsupported, match="caches of int8 are not supported"):
        aot.lower(mosaic, arguments(2, 3, 2, 8, 64, "int8"), TARGETS["H200"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: shaped(3, 2, 8)}, r"4 axes .* \(3, 2, 8\)"),
        ({1: shaped(3, 2, 4, 64)}, "caches differ"),
        ({2: shaped(2, 3, 64)}, r"k and v must be \[2, 2, D\] .* got \(2, 3, 64\)"),
        ({2: shaped(2, 2, 65), 3: shaped(2, 2, 65)}, "k has head size 65, the cache only 64"),
        ({4: shaped(2, dtype="float32")}, r"slots must be integers, got float32\[2\]"),
        ({4: shaped(0, dtype="int32")}, r"must be \[0, 2, D\] for 0 slots"),
        ({0: shaped(0, 2, 8, 64)}, r"a cache holds no token, its shape is \(0, 2, 8, 64\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_the_numbers(changes, message):
    args = [changes.get(i, arg) for i, arg in enumerate(arguments(2, 3, 2, 8, 64))]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(write_kv, *args)


def test_an_unknown_implementation_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="unknown kv_write 'fast'; choose one of auto, reference"):
        jax.eval_shape(lambda *args: write_kv(*args, impl="fast"), *arguments(2, 3, 2, 8, 64))
