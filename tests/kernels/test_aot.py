"""The tool that lowers and compiles for GPUs that are not here, on small kernels of its own."""

import os
import re
from importlib import metadata

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt

from pallas_kernels import targets
from pallas_kernels.lab import aot, ptx
from pallas_kernels.targets import TARGETS
from tests.compiler import needs_compiler

A100, L4, H200, B200 = TARGETS.values()
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def double(x: jax.Array) -> jax.Array:
    """[n, 128, 64] -> the same, by a program for each n that takes it through shared memory."""
    n, *tile = x.shape
    uses_tma = targets.current().compute_capability >= (9, 0)

    def double_tile(x_ref, y_ref, tile_ref, arrived):
        i = lax.axis_index("i")
        if uses_tma:
            plgpu.copy_gmem_to_smem(x_ref.at[i], tile_ref, arrived)
            plgpu.barrier_wait(arrived)
        else:
            in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
            plgpu.copy_gmem_to_smem(x_ref.at[i], tile_ref, oob_mode=in_bounds)
            plgpu.wait_gmem_to_smem(0)
        y_ref[i] = tile_ref[...] * 2

    return plgpu.kernel(
        double_tile,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(tile, x.dtype), plgpu.Barrier()],
        grid=(n,),
        grid_names=("i",),
    )(x)


def hold(x: jax.Array) -> jax.Array:
    """[rows, columns] over its sum, by one program whose threads hold all of it in registers."""

    def body(x_ref, y_ref):
        x = x_ref[...]
        y_ref[...] = x / jnp.sum(x, axis=1, keepdims=True)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        body, out_shape=shape, compiler_params=plt.CompilerParams(num_warps=4), name="hold"
    )(x)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_lower_finds_a_kernel_and_its_shared_memory(target):
    [kernel] = aot.lower(double, [floats(3, 128, 64)], target)
    assert (kernel.name, kernel.backend, kernel.grid) == ("double_tile", "mosaic", (3, 1, 1))
    assert kernel.dynamic_shared_memory == 128 * 64 * 4 + 8  # the tile and the barrier


def test_lower_knows_no_shared_memory_of_triton():
    [kernel] = aot.lower(hold, [floats(32, 64)], H200)
    assert (kernel.name, kernel.backend, kernel.grid) == ("hold", "triton", (1, 1, 1))
    assert kernel.dynamic_shared_memory is None


def test_lower_refuses_more_shared_memory_than_the_gpu_has():
    args = [floats(3, 256, 128)]
    assert aot.lower(double, args, A100)
    with pytest.raises(ValueError, match=r"double_tile takes 131080 .* L4 has at most 101376"):
        aot.lower(double, args, L4)


def test_lower_raises_what_pallas_refuses():
    def copy_without_barrier(x):
        with targets.compiling_for(A100):
            return double(x)

    with pytest.raises(Exception, match="pre-Hopper"):
        aot.lower(copy_without_barrier, [floats(3, 128, 64)], H200)


def test_a_jitted_function_is_lowered_anew_for_each_gpu():
    by_generation = jax.jit(lambda x: double(jnp.concatenate([x] * targets.current().num_cores)))
    for target in (A100, H200):
        [kernel] = aot.lower(by_generation, [floats(1, 128, 64)], target)
        assert kernel.grid == (target.num_cores, 1, 1)


def test_a_function_may_start_no_kernel():
    assert aot.lower(jnp.sin, [floats(3)], H200) == ()


@needs_compiler
def test_each_kernel_is_reported_on_by_itself():
    """Two kernels by each compiler, of the same names."""

    def four(x):
        return double(x), double(x[:, :64]), hold(x[0]), hold(x[0, :32])

    kernels = aot.compile(four, [floats(3, 128, 64)], H200).kernels
    assert [kernel.name for kernel in kernels] == ["double_tile"] * 2 + ["hold"] * 2
    assert [kernel.backend for kernel in kernels] == ["mosaic"] * 2 + ["triton"] * 2
    assert [kernel.threads for kernel in kernels] == [128] * 4
    tiles = [kernel.dynamic_shared_memory for kernel in kernels[:2]]
    assert tiles == [128 * 64 * 4 + 8, 64 * 64 * 4 + 8]
    assert kernels[2].registers > kernels[3].registers
    assert len({kernel.ptx for kernel in kernels}) == 4


@needs_compiler
@pytest.mark.parametrize(
    ("target", "copies"),
    [
        (A100, "cp.async.ca"),
        (L4, "cp.async.ca"),
        (H200, "cp.async.bulk.tensor"),
        (B200, "cp.async.bulk.tensor"),
    ],
    ids=TARGETS,
)
def test_a_kernel_is_compiled_for_each_gpu_in_one_process(target, copies):
    [kernel] = aot.compile(double, [floats(3, 128, 64)], target).kernels
    assert f".target {target.arch}" in kernel.ptx
    assert kernel.spills == kernel.stack == 0
    found = {name for name, count in kernel.instructions.items() if count}
    assert found == {copies}
    # 33 KB and the system's 1 KB.
    programs = {A100: 4, L4: 3, H200: 6, B200: 6}[target]
    assert kernel.occupancy[:2] == (programs, "shared memory")


@needs_compiler
def test_compiling_again_gives_the_same_report():
    """Mosaic compiles a kernel once in a process, and dumps what it compiles."""
    first, second = (aot.compile(double, [floats(3, 128, 64)], H200).kernels[0] for _ in range(2))
    assert first.registers == second.registers
    assert first.instructions == second.instructions


@needs_compiler
def test_spills_are_found():
    values_of_a_thread = 64 * 512 // 128
    [kernel] = aot.compile(hold, [floats(64, 512)], H200).kernels
    assert kernel.spills > 2 * 4 * (values_of_a_thread - kernel.registers)  # stored and loaded
    assert kernel.stack > 0
    [kernel] = aot.compile(hold, [floats(32, 64)], H200).kernels
    assert kernel.spills == kernel.stack == 0


@needs_compiler
def test_shared_memory_of_triton_is_what_xla_launches_with():
    def product(x):
        def body(x_ref, y_ref):
            y_ref[...] = jnp.dot(x_ref[...], x_ref[...]).astype(y_ref.dtype)

        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
            compiler_params=plt.CompilerParams(),
        )(x)

    [kernel] = aot.compile(product, [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)], A100).kernels
    assert kernel.instructions["mma.sync"] > 0
    assert kernel.dynamic_shared_memory >= 64 * 64 * 2


@needs_compiler
def test_compiling_leaves_the_environment_and_jaxs_options_alone(monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", "elsewhere")
    before = dict(os.environ), dict(jax.config.values)
    aot.compile(double, [floats(3, 128, 64)], H200)
    assert (dict(os.environ), dict(jax.config.values)) == before


def test_without_the_compiler_the_extra_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert not aot.is_available()
    with pytest.raises(aot.Missing, match=re.escape('pip install -e ".[aot]"')):
        aot.compile(double, [floats(3, 128, 64)], H200)


@needs_compiler
def test_ptxas_words_are_told():
    with pytest.raises(RuntimeError, match=r"refuses the kernel for sm_90a: .* \.version 99"):
        ptx.assemble(".version 99.9\n.target sm_90a\n", "sm_90a")


def test_instructions_are_told_apart():
    counts = ptx.instruction_counts(
        """
        // mma.sync in a comment
        @%p1 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1};
        wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1;
        { cp.async.cg.shared.global [%r1], [%rd1], 16; }
        cp.async.wait_all; cp.async.bulk.commit_group;
        cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1];
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%rd1];
        fence.proxy.async.shared::cta; fence.mbarrier_init.release.cluster;
        """
    )
    assert counts == {
        "mma.sync": 1,
        "wgmma.mma_async": 1,
        "tcgen05.mma": 0,
        "cp.async.ca": 0,
        "cp.async.cg": 1,
        "cp.async.bulk.tensor": 1,
        "ldmatrix": 1,
        "fence.proxy.async": 1,
    }


@pytest.mark.parametrize(
    ("target", "registers", "threads", "shared_memory", "programs", "limited_by", "threads_used"),
    [
        (H200, 128, 128, 0, 4, "registers", 0.25),
        (H200, 129, 128, 0, 3, "registers", 0.1875),  # 136 a thread: 15 warps, in fours
        (H200, 32, 256, 0, 8, "registers", 1.0),  # as tight as threads
        (H200, 32, 32, 0, 32, "programs", 0.5),
        (L4, 32, 32, 0, 24, "programs", 0.5),
        (L4, 16, 256, 0, 6, "threads", 1.0),
        (A100, 64, 128, 68 << 10, 2, "shared memory", 0.125),
        (A100, 64, 128, 81 << 10, 2, "shared memory", 0.125),  # and 1 KB of the system's: all
        (A100, 64, 128, (81 << 10) + 1, 1, "shared memory", 0.0625),
        (A100, 255, 512, 0, 0, "registers", 0.0),
    ],
)
def test_occupancy(target, registers, threads, shared_memory, programs, limited_by, threads_used):
    found = targets.occupancy(target, registers, threads, shared_memory)
    assert found == (programs, limited_by, threads_used)
