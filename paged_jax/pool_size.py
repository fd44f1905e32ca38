"""How many blocks fit."""

import jax
import jax.numpy as jnp

from paged_jax.kv_cache import bytes_per_block
from paged_jax.models.config import ModelConfig
from paged_jax.models.shapes import num_parameters

GPU_MEMORY_SHARE = 0.9  # of what the device has, weights included
HOST_POOL_BYTES = 1 << 30  # at most, where the cache lives in host memory


def default_num_blocks(
    config: ModelConfig, *, block_size: int, dtype: str, max_num_seqs: int, max_model_len: int
) -> int:
    """Blocks for ``max_num_seqs`` sequences of ``max_model_len`` tokens, or as many as fit.

    On a GPU they fit in what `GPU_MEMORY_SHARE` of its memory leaves beside what is in use and the
    weights, which are yet to come; on a CPU in `HOST_POOL_BYTES`. ValueError if not even one does.
    """
    per_block = bytes_per_block(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=block_size,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    room = HOST_POOL_BYTES
    device = jax.devices()[0]
    if device.platform != "cpu":
        stats = device.memory_stats()
        weights = num_parameters(config) * jnp.dtype(dtype).itemsize
        room = int(stats["bytes_limit"] * GPU_MEMORY_SHARE) - stats["bytes_in_use"] - weights
    fitting = room // per_block - 1  # the null block takes one
    if fitting < 1:
        raise ValueError(
            f"a block of {block_size} slots takes {per_block} bytes, {room} are left for the KV "
            "cache; use a smaller model or block_size"
        )
    return min(fitting, max_num_seqs * -(-max_model_len // block_size))
