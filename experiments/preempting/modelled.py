"""What preemption costs OPT-13B on an A100-40GB: modelled, nothing is measured.

By `paged_jax.simulation.cost_model`, which says what is assumed. The paper's system issues a copy
for each block and layer, keys and values apart. This framework gathers many blocks on the device
first, and copies what it has gathered at once (`paged_jax.executor.swap_pool`). The time of the
framework on the host is left out: it goes by in any iteration.
"""

from dataclasses import replace

from paged_jax.executor.swap_pool import MAX_STEP_BLOCKS, STAGING_BYTES
from paged_jax.simulation.cost_model import RooflineCost
from paged_jax.simulation.hardware import find_gpu
from paged_jax.simulation.model_shapes import find_model_shape
from paged_jax.simulation.step_work import StepWork

COST = RooflineCost(
    find_gpu("A100-40GB"),
    find_model_shape("OPT-13B"),
    iteration_overhead_s=0,
    sequence_overhead_s=0,
)


def num_copies(num_tokens: int, block_size: int) -> int:
    """Copies that the paper's system issues to move the tokens one way."""
    return 2 * COST.model.num_layers * -(-num_tokens // block_size)


def swap_s(num_tokens: int, block_size: int) -> float:
    """Seconds, out and in again, with a copy for each block and layer."""
    return 2 * COST.swap_s(-(-num_tokens // block_size), block_size)


def gathered_swap_s(num_tokens: int, block_size: int) -> float:
    """Seconds, out and in again, with blocks gathered on the device before they are copied."""
    num_blocks = -(-num_tokens // block_size)
    block_bytes = block_size * COST.model.kv_bytes_per_token
    at_once = max(1, min(MAX_STEP_BLOCKS, STAGING_BYTES // block_bytes))
    num_steps = -(-num_blocks // at_once)
    copies_s = replace(COST, swap_copies_per_block=0).swap_s(num_blocks, block_size)
    # Gathered, and scattered: read and written once more.
    bandwidth = COST.gpu.memory_bandwidth * COST.efficiency.memory
    staging_s = 2 * num_blocks * block_bytes / bandwidth
    return 2 * (copies_s + staging_s + num_steps * (COST.swap_copy_s + COST.gpu.kernel_launch_s))


def recompute_s(num_tokens: int, block_size: int) -> float:
    """Seconds of one prefill of so many tokens, which samples a token."""
    work = StepWork(
        num_decodes=0,
        decode_context=0,
        prefills=((0, num_tokens),),
        num_first_samples=1,
        block_size=block_size,
    )
    return COST.step_s(work)
