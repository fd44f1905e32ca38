"""What preemption costs a large model on a GPU that is not here: modelled, nothing is measured.

    swap        bytes / PCIe bandwidth, each way, and a fixed time for every copy that is issued
    recompute   max(matrices, reading the weights) + attention + launches, of one prefill

The paper's system issues a copy for each block, each layer, keys and values apart. This framework
gathers many blocks on the device first and issues one copy for all layers of up to so many of them
(`paged_jax.executor.swap_pool`).
"""

from dataclasses import dataclass

from paged_jax.executor.swap_pool import MAX_STEP_BLOCKS, STAGING_BYTES


@dataclass(frozen=True)
class Setup:
    """A model of plain transformer layers on one GPU. Rates are what is reached, not the peak.

    memory_bandwidth, flops, attention_flops: 0.9 of the data sheet's bytes/s; 0.7 of its FLOP/s for
        large matrices and 0.33 for attention in prefill, as cuBLAS and FlashAttention reached
        (Dao 2023, FlashAttention-2, section 1).
    host_bandwidth: pinned memory over PCIe 4.0 x16, of whose 32 GB/s about 25 are reached.
    copy_s: of issuing a copy: 5 to 7 us a call were measured ("DualPath", arXiv 2602.21548, section
        5.2), 2.3 us on an H20 (FlexKV's pull request 193).
    launch_s: of a kernel, of which a layer takes `kernels_per_layer`.
    """

    num_layers: int
    hidden_size: int
    num_parameters: float
    memory_bandwidth: float
    flops: float
    attention_flops: float
    host_bandwidth: float
    copy_s: float = 5e-6
    launch_s: float = 4e-6
    kernels_per_layer: int = 12
    bytes_per_value: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.hidden_size * self.bytes_per_value

    def num_copies(self, num_tokens: int, block_size: int) -> int:
        """Copies that the paper's system issues to move the tokens one way."""
        return 2 * self.num_layers * -(-num_tokens // block_size)

    def swap_s(self, num_tokens: int, block_size: int) -> float:
        """Seconds, out and in again, with a copy for each block and layer."""
        copies = self.num_copies(num_tokens, block_size)
        return 2 * (self._bytes_s(num_tokens, block_size) + copies * self.copy_s)

    def gathered_swap_s(self, num_tokens: int, block_size: int) -> float:
        """Seconds, out and in again, with blocks gathered before they are copied."""
        num_blocks = -(-num_tokens // block_size)
        block_bytes = block_size * self.kv_bytes_per_token
        at_once = max(1, min(MAX_STEP_BLOCKS, STAGING_BYTES // block_bytes))
        num_steps = -(-num_blocks // at_once)
        # Gathered, and scattered: read and written once more.
        staging_s = 2 * num_blocks * block_bytes / self.memory_bandwidth
        overhead_s = num_steps * (self.copy_s + self.launch_s)
        return 2 * (self._bytes_s(num_tokens, block_size) + staging_s + overhead_s)

    def recompute_s(self, num_tokens: int) -> float:
        """Seconds of a prefill of so many tokens, whatever the block size."""
        matrices = 2 * self.num_parameters * num_tokens / self.flops
        weights = self.num_parameters * self.bytes_per_value / self.memory_bandwidth
        pairs = num_tokens * (num_tokens + 1) / 2
        attention = 4 * self.num_layers * self.hidden_size * pairs / self.attention_flops
        launches = self.num_layers * self.kernels_per_layer * self.launch_s
        return max(matrices, weights) + attention + launches

    def _bytes_s(self, num_tokens: int, block_size: int) -> float:
        num_slots = -(-num_tokens // block_size) * block_size
        return num_slots * self.kv_bytes_per_token / self.host_bandwidth


# OPT-13B in float16 on an NVIDIA A100-40GB (SXM): 1555 GB/s, 312 TFLOP/s.
OPT_13B_ON_A100 = Setup(
    num_layers=40,
    hidden_size=5120,
    num_parameters=13e9,
    memory_bandwidth=0.9 * 1.555e12,
    flops=0.7 * 312e12,
    attention_flops=0.33 * 312e12,
    host_bandwidth=25e9,
)
