"""The CUDA tools that kernels are compiled with: the pinned wheel's, whatever else is installed."""

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

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


def has_ptxas() -> bool:
    """Whether the wheel is installed."""
    try:
        return bool(ptxas_version())
    except metadata.PackageNotFoundError:
        return False


def ptxas() -> Path:
    """PackageNotFoundError: the wheel is not installed."""
    return Path(str(metadata.distribution(PACKAGE).locate_file("nvidia/cuda_nvcc/bin/ptxas")))


def ptxas_version() -> str:
    """As "12.9.86". PackageNotFoundError: the wheel is not installed."""
    return metadata.version(PACKAGE)


@contextlib.contextmanager
def dumping_to(folder: Path) -> Iterator[None]:
    """Mosaic compiles with the wheel's ptxas, for any GPU, and writes PTX and more to ``folder``.

    It takes ptxas from the PATH, once in a process, and writes PTX of a version that it knows.
    """
    tools = _tools_for_mosaic()
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


def _tools_for_mosaic() -> Path:
    """A folder with bin/ptxas and bin/nvdisasm, which lasts as long as the process."""
    return Path(_folder_of_tools().name)


@functools.cache
def _folder_of_tools() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="cuda-")
    (Path(folder.name) / "bin").mkdir()
    for name, script in (("ptxas", _PTXAS.format(ptxas=ptxas())), ("nvdisasm", _NVDISASM)):
        path = Path(folder.name) / "bin" / name
        path.write_text(script)
        path.chmod(0o755)
    return folder
