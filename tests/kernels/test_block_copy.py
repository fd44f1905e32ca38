"""Moving blocks of all layers: which blocks every implementation touches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_copy
from pallas_kernels.block_copy import IMPLEMENTATIONS
from pallas_kernels.lab import aot
from pallas_kernels.lab.interpreter import Race, watch
from pallas_kernels.registry import Unsupported
from pallas_kernels.targets import TARGETS, compiling_for
from tests.compiler import needs_compiler

# [P, Hk, S, D] and how many caches: two programs to a block, one to a block, one row to a program.
CASES = [
    ((7, 4, 16, 128), "float16", 2),
    ((6, 2, 4, 64), "float32", 3),
    ((9, 1, 1, 80), "bfloat16", 2),
]


def run(function, impl, *args):
    """By the implementation; a kernel is interpreted and watched for races."""

    @jax.jit
    def move(*args):
        return function(*args, impl=impl, interpret=True, detect_races=True)

    watched = watch(lambda: jax.block_until_ready(move(*args)))
    assert watched.looked_for_races == (impl == "mosaic_gpu")
    return jax.tree.map(np.asarray, watched.result)


def numbered(shape, dtype, count) -> list[np.ndarray]:
    """Caches in which no two blocks are alike, and no two caches."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for _ in range(count)]


cases = pytest.mark.parametrize(("shape", "dtype", "count"), CASES, ids=str)
implementations = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


@implementations
@cases
def test_blocks_are_copied_in_every_cache_and_no_other_is_touched(impl, shape, dtype, count):
    caches = numbered(shape, dtype, count)
    # One source of two targets; padded with the null block.
    sources, targets = (np.array(x, np.int32) for x in ([1, 5, 1, 0, 0], [3, 2, 4, 0, 0]))
    copied = run(block_copy.copy_blocks, impl, caches, sources, targets)
    assert len(copied) == count
    for before, after in zip(caches, copied, strict=True):
        wanted = before.copy()
        wanted[[3, 2, 4]] = before[[1, 5, 1]]
        np.testing.assert_array_equal(after[1:], wanted[1:])


@implementations
@cases
def test_blocks_are_read_into_one_array_and_written_back_elsewhere(impl, shape, dtype, count):
    caches = numbered(shape, dtype, count)
    blocks = np.array([4, 1, 0], np.int32)
    staged = run(block_copy.read_blocks, impl, caches, blocks)
    assert staged.shape == (3, count, *shape[1:])
    for i, cache in enumerate(caches):
        np.testing.assert_array_equal(staged[:2, i], cache[blocks[:2]])

    homes = np.array([2, 5, 0], np.int32)
    written = run(block_copy.write_blocks, impl, caches, staged, homes)
    for before, after in zip(caches, written, strict=True):
        wanted = before.copy()
        wanted[homes[:2]] = before[blocks[:2]]
        np.testing.assert_array_equal(after[1:], wanted[1:])


def test_two_sources_for_one_target_are_a_race():
    """So that the tests above can find one."""
    caches = numbered((5, 1, 4, 64), "float32", 1)
    sources, targets = np.array([1, 2], np.int32), np.array([3, 3], np.int32)
    with pytest.raises(Race, match="write"):
        run(block_copy.copy_blocks, "mosaic_gpu", caches, sources, targets)


def shaped(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


LAYERS, BLOCKS = 8, 4
LLAMA = [shaped(20_000, 8, 16, 128)] * (2 * LAYERS)
INDICES = shaped(BLOCKS, dtype="int32")
STAGED = shaped(BLOCKS, 2 * LAYERS, 8, 16, 128)
CALLS = {
    "copy": (block_copy.copy_blocks, (LLAMA, INDICES, INDICES)),
    "read": (block_copy.read_blocks, (LLAMA, INDICES)),
    "write": (block_copy.write_blocks, (LLAMA, STAGED, INDICES)),
}


def mosaic(name):
    return lambda *args: CALLS[name][0](*args, impl="mosaic_gpu")


@pytest.mark.parametrize("name", CALLS)
def test_all_layers_are_one_launch_that_writes_into_the_caches_it_is_given(name):
    args = CALLS[name][1]
    with compiling_for(TARGETS["H200"]):
        step = jax.jit(mosaic(name), donate_argnums=0 if name != "read" else ())
        text = step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\],\s*operand_index = (\d+)", text)
    inputs = 0 if name == "read" else 2  # before the caches
    expected = [] if name == "read" else [(str(i), str(i + inputs)) for i in range(2 * LAYERS)]
    assert aliases == expected


@pytest.mark.parametrize(
    ("shape", "dtype", "target", "parts"),
    [
        ((9, 8, 16, 128), "bfloat16", "A100", 4),
        ((9, 3, 16, 64), "bfloat16", "L4", 1),
        ((9, 1, 1, 64), "float16", "B200", 1),
        ((9, 40, 256, 128), "float16", "H200", 320),
        ((9, 2, 4, 80), "float32", "H200", 1),
    ],
    ids=str,
)
def test_every_shape_lowers(shape, dtype, target, parts):
    caches = [shaped(*shape, dtype=dtype)] * 2
    [call] = aot.lower(mosaic("copy"), (caches, INDICES, INDICES), TARGETS[target])
    assert call.grid == (parts, BLOCKS, 2)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "target"), [("copy", "A100"), ("read", "L4"), ("write", "H200"), ("copy", "B200")]
)
def test_compiled_it_moves_16_bytes_at_a_time_and_needs_few_registers(name, target):
    caches, *args = CALLS[name][1]
    if name == "write":
        args = [shaped(BLOCKS, 2, 8, 16, 128), INDICES]
    [kernel] = aot.compile(mosaic(name), (caches[:2], *args), TARGETS[target]).kernels
    assert kernel.spills == kernel.stack == 0
    assert kernel.registers <= 40
    # Once for all caches, between which the compiler chooses; the loads before the first store.
    moves = re.findall(r"\b(ld|st)(?:\.global)?\.v4\.b32", kernel.ptx)
    assert moves == ["ld"] * 4 + ["st"] * 4


@needs_compiler
def test_caches_of_more_than_2_to_the_31_elements_are_addressed_with_64_bits():
    P, Hk, S, D = 500_000, 3, 16, 128
    caches = [shaped(P, Hk, S, D)] * 2
    assert P * Hk * S * D > 2**31
    args = (caches, INDICES, INDICES)
    [kernel] = aot.compile(mosaic("copy"), args, TARGETS["H200"]).kernels
    # The source block times its elements; the target is 64 bits wide already.
    assert re.search(rf"mul\.wide\.s32\s+%rd\d+, %r\d+, {Hk * S * D};", kernel.ptx)
    assert re.search(rf"mad\.lo\.s64\s+%rd\d+, %rd\d+, {Hk * S * D}, ", kernel.ptx)


def test_with_xla_too_donated_caches_are_updated_in_place():
    P, Hk, S, D = 1000, 2, 16, 32
    caches = [shaped(P, Hk, S, D, dtype="float32")] * 4
    step = jax.jit(block_copy.copy_blocks, donate_argnums=0)
    memory = step.lower(caches, INDICES, INDICES).compile().memory_analysis()
    num_bytes = 4 * 4 * P * Hk * S * D
    assert memory.alias_size_in_bytes == num_bytes
    assert memory.temp_size_in_bytes < num_bytes / 100


def test_without_a_gpu_the_kernel_refuses():
    caches, indices = numbered((3, 1, 4, 64), "float32", 2), np.array([1], np.int32)
    with pytest.raises(Unsupported, match=r"block_copy 'mosaic_gpu' .* needs an NVIDIA GPU"):
        block_copy.read_blocks(caches, indices, impl="mosaic_gpu")


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("copy", ([], INDICES, INDICES), "no caches"),
        ("copy", ([*LLAMA[:1], shaped(9, 8, 16, 64)], INDICES, INDICES), "caches differ"),
        ("copy", (LLAMA, INDICES, shaped(3, dtype="int32")), "4 sources, but 3 targets"),
        (
            "read",
            (LLAMA, shaped(4, dtype="float32")),
            r"blocks must be integers, got float32\[4\]",
        ),
        (
            "write",
            (LLAMA, STAGED, shaped(3, dtype="int32")),
            r"staged must be .*\(3, 16, 8.*\(4, 16",
        ),
        ("write", (LLAMA[:2], shaped(4, 2, 8, 16, 128, dtype="float32"), INDICES), "got float32"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(name, args, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(CALLS[name][0], *args)
