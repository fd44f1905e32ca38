"""Pallas' GPU interpreter, watched for faults that no result shows: races, reads out of bounds.

All that is private to JAX, or differs between its versions, is in this file.
"""

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPUSharedMemory

RACE = "RACE DETECTED"
OUT_OF_BOUNDS = "Out-of-bounds"


class KernelFault(Exception):
    """A fault of a kernel that the interpreter saw; the text says which."""


class Race(KernelFault):
    """Two accesses, one of them a write, that nothing puts in order."""


class OutOfBounds(KernelFault):
    """An access outside of an array, such as to a block that does not exist."""


class Watched[Result](NamedTuple):
    """The result of a call, and whether the interpreter looked for races in it."""

    result: Result
    looked_for_races: bool


def watch[Result](call: Callable[[], Result]) -> Watched[Result]:
    """Run `call`, which must wait for its results; raises `Race` or `OutOfBounds`.

    A race raises in JAX 0.12; in 0.11 it is printed and the kernel goes on.
    """
    gpu_callbacks.reset_gpu_interpret_mode_state()
    printed = io.StringIO()
    try:
        with (
            mock.patch.object(GPUSharedMemory, "access", _access_in_bounds),
            contextlib.redirect_stdout(printed),
        ):
            result = call()
        if RACE in printed.getvalue():
            raise Race(_race(printed.getvalue()))
        state = gpu_callbacks._races
        return Watched(result, state is not None and bool(state.reads or state.writes))
    except KernelFault:
        raise
    except Exception as error:
        reports = printed.getvalue() + str(error)
        if RACE in reports:
            raise Race(_race(reports)) from error
        if OUT_OF_BOUNDS in reports:
            raise OutOfBounds(reports[reports.index(OUT_OF_BOUNDS) :].splitlines()[0]) from error
        raise
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


_access = GPUSharedMemory.access


def _access_in_bounds(memory: GPUSharedMemory, key: Any, transforms: Any) -> Any:
    """The part of a buffer that a load, store or copy touches; raises where it reaches outside.

    By itself the interpreter counts a negative index from the end and reads zeros outside of a
    buffer, as the TMA does; cp.async would read whatever is there.
    """
    access = _access(memory, key, transforms)
    shape = memory.buffer_shape_and_dtype(key).shape
    for index, size in zip(access.range, shape, strict=True):
        low, high = (index.start, index.stop) if isinstance(index, slice) else (index, index + 1)
        if low < 0 or high > size:
            indices = ", ".join(
                f"{i.start}:{i.stop}" if isinstance(i, slice) else str(i) for i in access.range
            )
            raise IndexError(f"{OUT_OF_BOUNDS} access of [{indices}] in an array of {shape}.")
    return access


def _race(reports: str) -> str:
    """The two accesses of the first race that is reported, and where they stand in the source."""
    first = reports[reports.index(RACE) :]
    accesses = re.findall(r"^ *(read|write) of .*, (.+?)(?: \(.*)?$", first, flags=re.MULTILINE)[:2]
    return "race of " + " and ".join(f"a {kind} at {place}" for kind, place in accesses)
