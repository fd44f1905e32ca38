"""A kernel's PTX: its instructions, and what ptxas makes of it.

ptxas is that of the pinned wheel, whatever else is installed.
"""

import contextlib
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

# They tell how a kernel copies and multiplies. Each stands for all instructions that begin so.
INSTRUCTIONS = (
    "mma.sync",
    "wgmma.mma_async",
    "tcgen05.mma",
    "cp.async.ca",
    "cp.async.cg",
    "cp.async.bulk.tensor",
    "ldmatrix",
    "fence.proxy.async",
)

PACKAGE = "nvidia-cuda-nvcc-cu12"

# Mosaic passes ptxas the -arch of the first kernel that the process compiled; ptxas takes the last.
_PTXAS = """#!/bin/sh
arch=
[ -f "$1" ] && arch=$(sed -n 's/^\\.target *\\(sm_[0-9a-z]*\\).*/\\1/p' "$1")
exec '{ptxas}' "$@" ${{arch:+"-arch=$arch"}}
"""

# Mosaic also disassembles what it dumps, with a tool that the wheel lacks.
_NVDISASM = """#!/bin/sh
exit 0
"""


class Assembled(NamedTuple):
    """ptxas' report on one kernel. Sizes in bytes."""

    registers: int  # per thread
    spill_stores: int
    spill_loads: int
    stack: int
    shared_memory: int  # static


def instruction_counts(ptx: str) -> dict[str, int]:
    """How often each of `INSTRUCTIONS` stands in a kernel's text (loops count once)."""
    code = re.sub(r"//.*", "", ptx)
    return {
        name: len(re.findall(rf"(?<![\w.]){re.escape(name)}(?![\w])", code))
        for name in INSTRUCTIONS
    }


def entry_names(ptx: str) -> list[str]:
    """The kernels in a PTX module."""
    return re.findall(r"\.entry\s+(\w+)", ptx)


def threads(ptx: str) -> int:
    """Threads in a program, which the kernel states. ValueError if it does not."""
    if sizes := re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", ptx):
        x, y, z = (int(n or 1) for n in sizes.groups())
        return x * y * z
    raise ValueError(f"the kernels {entry_names(ptx)} do not state how many threads they have")


def assemble(ptx: str, arch: str) -> Assembled:
    """Assemble one kernel for `arch` ("sm_90a").

    RuntimeError with ptxas' words if it refuses; PackageNotFoundError if it is not installed.
    """
    command = [str(ptxas()), "-v", f"-arch={arch}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas {ptxas_version()} refuses the kernel for {arch}: {done.stderr}")

    def number(pattern: str) -> int:
        found = re.search(pattern, done.stderr)
        return int(found[1]) if found else 0

    if "Used" not in done.stderr:
        raise RuntimeError(f"ptxas {ptxas_version()} reports no registers: {done.stderr}")
    return Assembled(
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        shared_memory=number(r"(\d+) bytes smem"),
    )


def has_ptxas() -> bool:
    """Whether the wheel with ptxas is installed."""
    try:
        return bool(ptxas_version())
    except metadata.PackageNotFoundError:
        return False


def ptxas() -> Path:
    """The path of ptxas. PackageNotFoundError: the wheel is not installed."""
    return Path(str(metadata.distribution(PACKAGE).locate_file("nvidia/cuda_nvcc/bin/ptxas")))


def ptxas_version() -> str:
    """The version, as "12.9.86". PackageNotFoundError: the wheel is not installed."""
    return metadata.version(PACKAGE)


@contextlib.contextmanager
def dumping_to(folder: Path) -> Iterator[None]:
    """Mosaic compiles with the wheel's ptxas, for any GPU, and writes PTX and more to `folder`.

    It takes ptxas from the PATH, once in a process, and writes PTX of a version that it knows.
    """
    tools = Path(_mosaic_tools().name)
    variables = {
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "MOSAIC_GPU_CUDA_ROOT": str(tools),
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def _mosaic_tools() -> tempfile.TemporaryDirectory[str]:
    """A folder with bin/ptxas and bin/nvdisasm, which lasts as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="cuda-")
    (Path(folder.name) / "bin").mkdir()
    for name, script in (("ptxas", _PTXAS.format(ptxas=ptxas())), ("nvdisasm", _NVDISASM)):
        path = Path(folder.name) / "bin" / name
        path.write_text(script)
        path.chmod(0o755)
    return folder
