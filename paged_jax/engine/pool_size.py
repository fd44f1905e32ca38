"""The number of blocks that fit on the device, and in the host memory that they are swapped to."""

import os

import jax
import jax.numpy as jnp

from paged_jax.config import EngineConfig
from paged_jax.memory.sizing import bytes_per_block, num_blocks_in, room_for_kv
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import num_parameters

GPU_MEMORY_SHARE = 0.9  # the part of a GPU's memory for weights and cache
HOST_POOL_BYTES = 1 << 30  # the largest cache on a CPU, by default
SWAP_BYTES = 4 << 30  # the largest host pool for swapped blocks, by default


def num_blocks(config: ModelConfig, options: EngineConfig, *, cache_head_size: int) -> int:
    """Blocks of the pool, the null block not counted.

    By default the pool has room for `max_num_seqs` sequences of `max_model_len` tokens, within
    `GPU_MEMORY_SHARE` of a GPU's memory beside the weights, or within `HOST_POOL_BYTES` on a CPU.
    ValueError for more blocks than the device's memory holds, and where not even one block fits.
    """
    wanted, dtype, block_size = options.num_blocks, options.dtype, options.block_size
    per_block = _bytes_per_block(config, options, cache_head_size)
    device = jax.devices()[0]
    weights = num_parameters(config) * jnp.dtype(dtype).itemsize  # yet to come
    if device.platform == "cpu":
        memory = room_for_kv(_host_bytes(), weights)
        room = min(HOST_POOL_BYTES, memory)
    else:
        stats = device.memory_stats()
        limit, in_use = stats["bytes_limit"], stats["bytes_in_use"]
        memory = room_for_kv(limit, weights, in_use_bytes=in_use)
        room = room_for_kv(limit, weights, share=GPU_MEMORY_SHARE, in_use_bytes=in_use)
    if wanted is not None:
        if wanted > num_blocks_in(memory, per_block):
            raise ValueError(
                f"num_blocks {wanted}: {wanted + 1} blocks of {per_block} bytes do not fit in the "
                f"{memory} bytes that the device has beside the weights; at most "
                f"{num_blocks_in(memory, per_block)} do"
            )
        return wanted
    fitting = num_blocks_in(room, per_block)
    if fitting < 1:
        raise ValueError(
            f"a block of {block_size} slots takes {per_block} bytes, {room} are left for the KV "
            "cache; use a smaller model or block_size"
        )
    return min(fitting, options.max_num_seqs * -(-options.max_model_len // block_size))


def num_swap_blocks(
    config: ModelConfig, options: EngineConfig, num_blocks: int, *, cache_head_size: int
) -> int:
    """Blocks of the host pool, for a device pool of `num_blocks`.

    By default it has as many blocks as the device, within `SWAP_BYTES`. It has none if preemption
    never swaps, and none on a CPU unless preemption always swaps: the cache is in host memory
    there, and a larger pool serves better than a second one.
    ValueError for more blocks than the host's memory holds.
    """
    wanted, mode = options.swap_space_blocks, options.preemption_mode
    per_block = _bytes_per_block(config, options, cache_head_size)
    if wanted is not None:
        if wanted > _host_bytes() // per_block:
            raise ValueError(
                f"swap_space_blocks {wanted}: blocks of {per_block} bytes do not fit in the "
                f"{_host_bytes()} bytes of host memory; at most {_host_bytes() // per_block} do"
            )
        return wanted
    if mode == "recompute" or (mode == "auto" and jax.default_backend() == "cpu"):
        return 0
    return min(num_blocks, SWAP_BYTES // per_block)


def _bytes_per_block(config: ModelConfig, options: EngineConfig, cache_head_size: int) -> int:
    return bytes_per_block(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=options.block_size,
        head_dim=cache_head_size,
        bytes_per_value=jnp.dtype(options.dtype).itemsize,
    )


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
