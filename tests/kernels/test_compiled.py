"""What the compilers make of the attention kernels: all lower, and compile well, for every GPU."""

import itertools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.lab import aot
from pallas_kernels.paged_attention import Unsupported, cache_head_size, paged_prefill_attention
from pallas_kernels.targets import TARGETS, Target
from tests.compiler import needs_compiler

A100, L4, H200, B200 = TARGETS.values()
DTYPES = {
    "mosaic_gpu": ("bfloat16", "float16"),
    "mosaic_gpu_wgmma": ("bfloat16", "float16"),
    "triton": ("bfloat16", "float16", "float32"),
}
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEAD_SIZES = (64, 80, 96, 128, 256)
# Take turns: heads and KV heads; queries; soft cap and sliding window.
HEADS = ((4, 4), (8, 2), (9, 3), (16, 1))
NUM_QUERIES = (1, 40)
OPTIONS = ((None, None), (30.0, 100))
EVERY = 4  # configuration is lowered in the quick tests, too

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


@dataclass(frozen=True)
class Shape:
    """A call of attention, as it is traced."""

    heads: tuple[int, int] = (8, 2)  # heads, KV heads
    head_size: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    num_queries: int = 1
    options: tuple[float | None, int | None] = (None, None)  # soft cap, sliding window
    batch: int = 6
    max_blocks: int = 10

    def __str__(self) -> str:
        queries, (heads, kv_heads) = self.num_queries, self.heads
        size = f"S{self.block_size}-D{self.head_size}-H{heads}:{kv_heads}-T{queries}"
        return f"{size}-{self.dtype}{'-window' if self.options[1] else ''}"


def call(impl: str, shape: Shape) -> tuple[partial, list[jax.ShapeDtypeStruct]]:
    """The function to compile, and its arguments."""
    (heads, kv_heads), (soft_cap, sliding_window) = shape.heads, shape.options
    dtype, B, M = jnp.dtype(shape.dtype), shape.batch, shape.max_blocks
    cache = (B * M + 1, kv_heads, shape.block_size, cache_head_size(impl, shape.head_size))
    attend = partial(
        paged_prefill_attention,
        impl=impl,
        scale=shape.head_size**-0.5,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
    )
    arrays = [
        ((B, shape.num_queries, heads, shape.head_size), dtype),
        (cache, dtype),
        (cache, dtype),
        ((B, M), jnp.int32),
        ((B,), jnp.int32),
        ((B,), jnp.int32),
    ]
    return attend, [jax.ShapeDtypeStruct(*array) for array in arrays]


def has_tma(target: Target) -> bool:
    return target.compute_capability >= (9, 0)


def is_supported(impl: str, shape: Shape, target: Target) -> bool:
    """Mosaic copies tiles of 8 rows, or of 2048 elements where it has no TMA; two must fit."""
    if impl == "triton":
        return True
    if impl == "mosaic_gpu_wgmma" and target is not H200:
        return False
    if target is L4 and shape.head_size == 256:
        return False
    elements = shape.block_size * cache_head_size(impl, shape.head_size)
    return shape.block_size >= 8 and (has_tma(target) or elements >= 2048)


def configurations(impl: str) -> list:
    """Every block size with every head size for every GPU; the rest takes turns."""
    variants = list(itertools.product(HEADS, DTYPES[impl], NUM_QUERIES, OPTIONS))
    products = itertools.product(TARGETS.values(), BLOCK_SIZES, HEAD_SIZES)
    cases = []
    for index, (target, block_size, head_size) in enumerate(products):
        # Steps of 7, which has no divisor in common with the number of variants.
        variant = variants[index * 7 % len(variants)]
        shape = Shape(variant[0], head_size, block_size, *variant[1:])
        marks = [] if index % EVERY == 0 else [pytest.mark.slow]
        name = f"{impl}-{target.name}-{shape}"
        cases.append(pytest.param(impl, shape, target, id=name, marks=marks))
    return cases


@pytest.mark.parametrize(
    ("impl", "shape", "target"), [case for impl in DTYPES for case in configurations(impl)]
)
def test_every_configuration_lowers_or_is_refused(impl, shape, target):
    if is_supported(impl, shape, target):
        assert aot.lower(*call(impl, shape), target)
    else:
        with pytest.raises(Unsupported, match=f"attention '{impl}' cannot do this: "):
            aot.lower(*call(impl, shape), target)


@pytest.mark.parametrize("impl", ["mosaic_gpu", "mosaic_gpu_wgmma"])
def test_mosaic_refuses_float32(impl):
    with pytest.raises(Unsupported, match="not float32"):
        aot.lower(*call(impl, Shape(dtype="float32")), H200)


MODELS = {
    "Llama-3-8B": Shape((32, 8), batch=64, max_blocks=256),
    "OPT-13B": Shape((40, 40), dtype="float16", batch=64, max_blocks=128),
    "SmolLM2": Shape((9, 3), head_size=64, block_size=32, batch=64, max_blocks=64),
    "Gemma-2-9B": Shape((16, 8), head_size=256, options=(50.0, 4096), batch=16, max_blocks=256),
    "MQA": Shape((16, 1), batch=64, max_blocks=256),
    "2**33 elements": Shape((32, 8), batch=256, max_blocks=2048),
    "prefill": Shape((32, 8), num_queries=512, batch=4, max_blocks=256),
}
# Registers of a thread, for any GPU: 128 leave room for 4 programs on a core, 168 for 3, 255 for 2.
REGISTERS = {
    "mosaic_gpu": dict.fromkeys(MODELS, 128)
    | {"SmolLM2": 224, "Gemma-2-9B": 168, "MQA": 168, "prefill": 208},
    "mosaic_gpu_wgmma": dict.fromkeys(MODELS, 96)
    | {"SmolLM2": 192, "Gemma-2-9B": 104, "MQA": 128, "prefill": 200},
    "triton": dict.fromkeys(MODELS, 128) | {"2**33 elements": 168, "prefill": 168},
}
FENCES = {"mosaic_gpu": 1, "mosaic_gpu_wgmma": 2}  # to TMA: of the ring; and of the weights


@needs_compiler
@pytest.mark.parametrize(
    ("impl", "model", "target"),
    [
        pytest.param(impl, model, target, id=f"{impl}-{model}-{target.name}")
        for impl, model, target in itertools.product(DTYPES, MODELS, TARGETS.values())
        if is_supported(impl, MODELS[model], target)
    ],
)
def test_every_model_compiles_well(impl, model, target):
    shape = MODELS[model]
    [kernel] = aot.compile(*call(impl, shape), target).kernels
    assert kernel.spills == kernel.stack == 0
    assert kernel.registers <= REGISTERS[impl][model]
    if impl != "triton" and shape.head_size <= 128 and target is not L4:
        assert kernel.occupancy.programs_per_core >= 2, kernel.occupancy

    used = {name for name, count in kernel.instructions.items() if count}
    if impl == "triton":
        assert used & {"mma.sync", "wgmma.mma_async", "tcgen05.mma"}
        assert "cp.async.cg" in used
    elif has_tma(target):
        product = {"mosaic_gpu": "mma.sync", "mosaic_gpu_wgmma": "wgmma.mma_async"}[impl]
        assert used == {product, "ldmatrix", "cp.async.bulk.tensor", "fence.proxy.async"}
        assert kernel.instructions["fence.proxy.async"] == FENCES[impl]
    else:
        assert used == {"mma.sync", "ldmatrix", "cp.async.cg"}
