"""What is in a kernel's PTX: its instructions, and what the pinned ptxas makes of it."""

import re
import subprocess
from typing import NamedTuple

from pallas_kernels.lab import toolkit

# What tells how a kernel copies and multiplies. Each stands for the instructions that begin so.
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


class Assembled(NamedTuple):
    """What ptxas says of one kernel. Sizes in bytes."""

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
    """Assemble one kernel for ``arch`` ("sm_90a"), with the wheel's ptxas, whatever else is there.

    RuntimeError with ptxas' words if it refuses; PackageNotFoundError if it is not installed.
    """
    command = [str(toolkit.ptxas()), "-v", f"-arch={arch}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"ptxas {toolkit.ptxas_version()} refuses the kernel for {arch}: {done.stderr}"
        )

    def number(pattern: str) -> int:
        found = re.search(pattern, done.stderr)
        return int(found[1]) if found else 0

    if "Used" not in done.stderr:
        raise RuntimeError(f"ptxas {toolkit.ptxas_version()} reports no registers: {done.stderr}")
    return Assembled(
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        shared_memory=number(r"(\d+) bytes smem"),
    )
