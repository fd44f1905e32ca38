"""What a GPU can do, as its data sheet says. How much of it is reached is the cost model's."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU. Bytes, and bytes or floating-point operations per second."""

    name: str
    memory_bytes: int
    memory_bandwidth: float  # to its own memory
    flops: float  # dense matrix products of 16-bit values
    host_bandwidth: float  # PCIe, each direction
    link_bandwidth: float  # NVLink to the other GPUs of its node, each direction
    # From one kernel's end to the next one's start where launches are queued. Empty kernels run
    # back to back take 2 to 5 us each; data sheets do not say.
    kernel_launch_s: float = 4e-6


_GIB = 2**30

# Data sheets of the SXM modules: NVIDIA A100 (2021), H100 (2022), H200 (2024) and HGX B200 (2024,
# an eighth of the board's figures). FLOP/s are those without sparsity, of which the sheets print
# the double. What they call GB of memory are GiB, of which the driver takes some hundred MiB; of a
# B200's 192 one can use 180. PCIe 4.0 x16 carries 32 GB/s each way, 5.0 64 GB/s; NVLink's figures
# are sold as the sum of both directions.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100-40GB", 40 * _GIB, 1.555e12, 312e12, 32e9, 300e9),
        GPU("A100-80GB", 80 * _GIB, 2.039e12, 312e12, 32e9, 300e9),
        GPU("H100", 80 * _GIB, 3.35e12, 989e12, 64e9, 450e9),
        GPU("H200", 141 * _GIB, 4.8e12, 989e12, 64e9, 450e9),
        GPU("B200", 180 * _GIB, 8.0e12, 2250e12, 64e9, 900e9),
    )
}


def find_gpu(name: str) -> GPU:
    """The described GPU of this name; ValueError names those there are."""
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    raise ValueError(f"no description of GPU {name!r}; there are {', '.join(GPUS)}")
