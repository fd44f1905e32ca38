"""How many programs fit on a core of a GPU at once, by the numbers."""

from typing import NamedTuple

from pallas_kernels.targets import Target

# CUDA's limits of compute capability 8.0 to 10.0.
_WARP = 32
_REGISTERS_PER_CORE = 65536
_REGISTERS_OF_WARP_IN = 256  # registers are given to whole warps, in multiples of this
_WARPS_IN = 4  # and to this many warps at a time: a core has four parts
_RESERVED_SHARED_MEMORY = 1024  # bytes that the system takes of each program
_SHARED_MEMORY_IN = 128  # bytes
_PROGRAMS_PER_CORE = 32
_PROGRAMS_PER_CORE_8_9 = 24


class Occupancy(NamedTuple):
    """What fits on one core (streaming multiprocessor) at once."""

    programs_per_core: int
    limited_by: str  # "registers", "threads", "shared memory" or "programs"
    threads: float  # the part of the core's threads in use, 0 to 1


def occupancy(target: Target, registers: int, threads: int, shared_memory: int) -> Occupancy:
    """Programs of ``threads`` threads with ``registers`` each, ``shared_memory`` bytes in all.

    Of limits that are equally tight, the first of registers, shared memory, threads, programs is
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
