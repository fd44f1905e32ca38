"""The GPUs that kernels are written for. A kernel's choices and its lowering depend on them."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import jax


@dataclass(frozen=True)
class Target:
    """One GPU model. Sizes in bytes; bandwidth in bytes per second."""

    name: str
    device_kind: str  # as JAX reports it
    compute_capability: tuple[int, int]
    num_cores: int  # streaming multiprocessors
    shared_memory_per_core: int
    shared_memory_per_block: int
    threads_per_core: int
    l2_size: int
    memory_size: int
    memory_bandwidth: int
    clock_ghz: float

    @property
    def arch(self) -> str:
        """The name that ptxas knows; "a" adds the instructions of this generation alone."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


TARGETS = {
    target.name: target
    for target in (
        Target(
            "A100",
            "NVIDIA A100-SXM4-80GB",
            compute_capability=(8, 0),
            num_cores=108,
            shared_memory_per_core=167936,
            shared_memory_per_block=166912,
            threads_per_core=2048,
            l2_size=41943040,
            memory_size=84987740160,
            memory_bandwidth=2039 * 10**9,
            clock_ghz=1.41,
        ),
        Target(
            "L4",
            "NVIDIA L4",
            compute_capability=(8, 9),
            num_cores=58,
            shared_memory_per_core=102400,
            shared_memory_per_block=101376,
            threads_per_core=1536,
            l2_size=50331648,
            memory_size=23609475072,
            memory_bandwidth=300 * 10**9,
            clock_ghz=2.04,
        ),
        Target(
            "H200",
            "NVIDIA H200",
            compute_capability=(9, 0),
            num_cores=132,
            shared_memory_per_core=233472,
            shared_memory_per_block=232448,
            threads_per_core=2048,
            l2_size=52428800,
            memory_size=150754820096,
            memory_bandwidth=4800 * 10**9,
            clock_ghz=1.98,
        ),
        Target(
            "B200",
            "NVIDIA B200",
            compute_capability=(10, 0),
            num_cores=148,
            shared_memory_per_core=233472,
            shared_memory_per_block=232448,
            threads_per_core=2048,
            l2_size=132644864,
            memory_size=191514804224,
            memory_bandwidth=8000 * 10**9,
            clock_ghz=1.96,
        ),
    )
}

# CUDA's limits of compute capability 8.0 to 10.0.
_WARP = 32
_REGISTERS_PER_CORE = 65536
_REGISTERS_OF_WARP_IN = 256  # registers are given to whole warps, in multiples of this
_WARPS_IN = 4  # and to this many warps at a time: a core has four parts
_RESERVED_SHARED_MEMORY = 1024  # bytes that the system takes of each program
_SHARED_MEMORY_IN = 128  # bytes
_PROGRAMS_PER_CORE = 32
_PROGRAMS_PER_CORE_8_9 = 24

_compiling_for: ContextVar[Target | None] = ContextVar("compiling_for", default=None)


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Within it, `current` is `target`: kernels are traced as if that GPU were here."""
    token = _compiling_for.set(target)
    try:
        yield
    finally:
        _compiling_for.reset(token)


def current() -> Target | None:
    """The GPU that a kernel traced now will run on; None where there is none."""
    if target := _compiling_for.get():
        return target
    if jax.default_backend() != "gpu":
        return None
    return of_device(jax.devices()[0])


def of_device(device: jax.Device) -> Target:
    """The target with a device's name, or else that of its generation; ValueError if there is none.

    Where only the generation is known, the number of cores is the device's own.
    """
    for target in TARGETS.values():
        if target.device_kind == device.device_kind:
            return target
    major, minor = map(int, device.compute_capability.split("."))
    for target in TARGETS.values():
        if target.compute_capability[0] == major and (
            major > 8 or target.compute_capability[1] == minor
        ):
            return dataclasses.replace(
                target,
                name=device.device_kind,
                device_kind=device.device_kind,
                compute_capability=(major, minor),
                num_cores=device.core_count,
            )
    raise ValueError(
        f"no target describes {device.device_kind} (compute capability {major}.{minor}); "
        "add one to TARGETS"
    )


class Occupancy(NamedTuple):
    """What fits on one core (streaming multiprocessor) at once."""

    programs_per_core: int
    limited_by: str  # "registers", "threads", "shared memory" or "programs"
    threads: float  # the part of the core's threads in use, 0 to 1


def occupancy(target: Target, registers: int, threads: int, shared_memory: int) -> Occupancy:
    """Programs of `threads` threads with `registers` each, `shared_memory` bytes in all.

    Where limits are equally tight, the first of registers, shared memory, threads, programs is
    named. 0 programs: the kernel cannot be launched.
    """
    warps = -(-threads // _WARP)
    warps_in_registers = _REGISTERS_PER_CORE // _round_up(registers * _WARP, _REGISTERS_OF_WARP_IN)
    shared_memory = _round_up(shared_memory + _RESERVED_SHARED_MEMORY, _SHARED_MEMORY_IN)
    limits = {
        "registers": warps_in_registers // _WARPS_IN * _WARPS_IN // warps,
        "shared memory": target.shared_memory_per_core // shared_memory,
        "threads": target.threads_per_core // (warps * _WARP),
        "programs": _PROGRAMS_PER_CORE_8_9
        if target.compute_capability == (8, 9)
        else _PROGRAMS_PER_CORE,
    }
    limited_by = min(limits, key=limits.__getitem__)
    programs = limits[limited_by]
    return Occupancy(programs, limited_by, programs * warps * _WARP / target.threads_per_core)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
