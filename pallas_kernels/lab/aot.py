"""Lower and compile kernels for a GPU that is not here, and read what came out.

`lower` needs JAX alone: it finds what Pallas refuses (layouts, tiles, shared memory). `compile`
needs the `aot` extra: it gives registers, spills, occupancy and instructions of every kernel,
Mosaic and Triton. The versions of JAX and ptxas decide the numbers, the machine does not. It sets
environment variables while it runs, and so is not for use from several threads.
"""

import contextlib
import dataclasses
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import extras, targets
from pallas_kernels.lab import kernel_calls, ptx
from pallas_kernels.lab.kernel_calls import KernelCall
from pallas_kernels.targets import Target


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel. Sizes in bytes, counts of instructions in the text: a loop's once."""

    name: str
    backend: str  # "mosaic" or "triton"
    grid: tuple[int, int, int]
    threads: int  # of one program
    registers: int  # of one thread
    spills: int  # stored and loaded
    stack: int  # of one thread
    static_shared_memory: int
    dynamic_shared_memory: int
    occupancy: targets.Occupancy
    instructions: dict[str, int]  # every one of ptx.INSTRUCTIONS
    ptx: str = dataclasses.field(repr=False)

    @property
    def shared_memory(self) -> int:
        return self.static_shared_memory + self.dynamic_shared_memory


@dataclass(frozen=True)
class CompiledReport:
    """The kernels of a function, compiled for a target; one for each call in its text."""

    target: Target
    ptxas: str  # its version
    kernels: tuple[KernelReport, ...]


class Missing(RuntimeError):
    """What compiling needs is not installed."""


def missing() -> str | None:
    """Why `compile` cannot compile, with what to install, in one line; None if it can."""
    if not extras.is_installed("jax_plugins.xla_cuda12"):
        reason = "JAX's CUDA plugin"
    elif not ptx.has_ptxas():
        reason = f"ptxas, of the package {ptx.PACKAGE}"
    else:
        return None
    return f"compiling for a GPU needs {reason}; install it with: {extras.command('aot')}"


def is_available() -> bool:
    """Whether `compile` can compile: the `aot` extra is installed."""
    return missing() is None


def lower(fn: Callable[..., Any], args: Sequence[Any], target: Target) -> tuple[KernelCall, ...]:
    """The kernels that `fn(*args)` starts on `target`, as lowered for it.

    `args` are arrays or jax.ShapeDtypeStruct, or trees of them. Raises what Pallas raises for a
    kernel it cannot lower; ValueError for one that takes more shared memory than the GPU has.
    """
    return _lower(fn, args, target)[1]


def compile(fn: Callable[..., Any], args: Sequence[Any], target: Target) -> CompiledReport:
    """Compile `fn(*args)` for `target` and report on each of its kernels.

    `Missing` without the `aot` extra; otherwise as `lower`, and what the compiler raises.
    """
    if reason := missing():
        raise Missing(reason)
    topology = topologies.get_topology_desc(
        topology_name=target.name,
        platform="cuda",
        target_config=_target_config(target),
        topology="1x1x1",
    )
    lowered, calls = _lower(fn, args, target, topology.devices[0])
    if not calls:  # XLA's own code is not reported on
        return CompiledReport(target, ptx.ptxas_version(), ())
    # Mosaic compiles a kernel once in a process and dumps only what it compiles.
    names = kernel_calls.rename(lowered, f"kernel_{secrets.token_hex(4)}_")
    with tempfile.TemporaryDirectory() as folder:
        with ptx.dumping_to(Path(folder)), _uncached():
            lowered.compile({"xla_dump_to": folder, "xla_dump_emitter_re": "^ptx$"})
        dump = _Dump(Path(folder))
        reports = (
            _report(call, dump.ptx(name), dump.dynamic_shared_memory(call, name), target)
            for call, name in zip(calls, names, strict=True)
        )
        return CompiledReport(target, ptx.ptxas_version(), tuple(reports))


def _lower(
    fn: Callable[..., Any], args: Sequence[Any], target: Target, device: Any = None
) -> tuple[jax.stages.Lowered, tuple[KernelCall, ...]]:
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=_device(target))
    sharding = device and NamedSharding(Mesh([device], ("x",)), PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    with jax.sharding.use_abstract_mesh(mesh), targets.compiling_for(target):
        # A function of its own: what jit keeps of `fn` may be of another target.
        traced = jax.jit(lambda *args: fn(*args)).trace(*shapes)
        lowered = traced.lower(lowering_platforms=("cuda",))
    calls = kernel_calls.find(lowered)
    for call in calls:
        needed = call.dynamic_shared_memory or 0
        if needed > target.shared_memory_per_block:
            raise ValueError(
                f"the kernel {call.name} takes {needed} bytes of shared memory, a program on "
                f"{target.name} has at most {target.shared_memory_per_block}"
            )
    return lowered, calls


@dataclass(frozen=True)
class _AbstractDevice(AbstractDevice):
    """JAX's, with what Mosaic looks for and takes to be 9.0 if it is not there."""

    compute_capability: str


def _device(target: Target) -> _AbstractDevice:
    major, minor = target.compute_capability
    return _AbstractDevice(target.device_kind, target.num_cores, "gpu", f"{major}.{minor}")


def _report(call: KernelCall, text: str, dynamic: int, target: Target) -> KernelReport:
    assembled = ptx.assemble(text, target.arch)
    threads = ptx.threads(text)
    shared_memory = assembled.shared_memory + dynamic
    return KernelReport(
        call.name,
        call.backend,
        call.grid,
        threads,
        assembled.registers,
        assembled.spill_stores + assembled.spill_loads,
        assembled.stack,
        assembled.shared_memory,
        dynamic,
        targets.occupancy(target, assembled.registers, threads, shared_memory),
        ptx.instruction_counts(text),
        text,
    )


class _Dump:
    """The files that compiling wrote, named by kernel (Mosaic) or by module (XLA)."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._ptx: dict[str, str] = {}
        for path in folder.glob("*.ptx"):
            text = path.read_text()
            self._ptx |= dict.fromkeys([path.stem, *ptx.entry_names(text)], text)

    def ptx(self, name: str) -> str:
        if name not in self._ptx:
            raise RuntimeError(
                f"the compiler wrote no PTX of kernel {name}, but {sorted(self._ptx)}"
            )
        return self._ptx[name]

    def dynamic_shared_memory(self, call: KernelCall, name: str) -> int:
        """Bytes: a Mosaic call states them; for a Triton call XLA's launch does."""
        if call.dynamic_shared_memory is not None:
            return call.dynamic_shared_memory
        [launches] = self._folder.glob("*.thunk_sequence.txt")
        pattern = rf"\b{name} grid: .*shared_memory: (\d+) bytes"
        if launch := re.search(pattern, launches.read_text()):
            return int(launch[1])
        raise RuntimeError(f"XLA names no launch of the kernel {name}")


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Keep what is compiled within out of JAX's cache, which could not load it again."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _target_config(target: Target) -> str:
    """XLA's description of the GPU, as text of its protocol buffer GpuTargetConfigProto."""
    major, minor = target.compute_capability
    return f"""
        platform_name: "CUDA"
        device_description_str: "{target.device_kind}"
        dnn_version_info {{ major: 9 minor: 8 }}
        gpu_device_info {{
            cuda_compute_capability {{ major: {major} minor: {minor} }}
            core_count: {target.num_cores}
            fpus_per_core: {64 if target.compute_capability == (8, 0) else 128}
            threads_per_warp: 32
            threads_per_block_limit: 1024
            threads_per_core_limit: {target.threads_per_core}
            block_dim_limit_x: 2147483647
            block_dim_limit_y: 65535
            block_dim_limit_z: 65535
            registers_per_core_limit: 65536
            registers_per_block_limit: 65536
            shared_memory_per_block: 49152
            shared_memory_per_block_optin: {target.shared_memory_per_block}
            shared_memory_per_core: {target.shared_memory_per_core}
            l2_cache_size: {target.l2_size}
            memory_bandwidth: {target.memory_bandwidth}
            device_memory_size: {target.memory_size}
            clock_rate_ghz: {target.clock_ghz}
        }}"""
