"""Swapping: a pool of KV blocks in host memory, and the steps that move blocks there and back."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jax import Array

from paged_jax.executor.buckets import bucket_of, padded
from paged_jax.steps.kv_cache import PagedKVCache, read_blocks, write_blocks

# A step moves at most this much, and takes as much memory on the device besides.
STAGING_BYTES = 64 << 20
MAX_STEP_BLOCKS = 64

# Blocks of one step: (device blocks i32[N], filled up with the null block; host blocks)
BlockMoves = tuple[np.ndarray, list[int]]


@jax.jit
def read_step(
    cache: PagedKVCache,
    blocks: Array,  # i32[N]
) -> Array:  # [N, 2 * layers, Hk, S, D]
    """The contents of blocks in all layers, to swap them out. The cache stays as it is."""
    return read_blocks(cache, blocks)


@partial(jax.jit, donate_argnames=("cache",))
def write_step(
    cache: PagedKVCache,
    staged: Array,  # [N, 2 * layers, Hk, S, D], as from read_step
    blocks: Array,  # i32[N], distinct, but for the null block where N was filled up
) -> PagedKVCache:
    """Write the contents of blocks in all layers, to swap them in; the cache is donated."""
    return write_blocks(cache, staged, blocks)


class SwapPool:
    """`num_blocks` blocks of all layers in pageable host memory.

    A block is contiguous: `[num_blocks, 2 * layers, Hk, S, D]`. The system gives it memory when it
    is first used. Many blocks move in one step, so that their number costs little.

    pinned: blocks that are read go through page-locked memory, which a GPU writes to directly; XLA
        stages blocks that are written by itself. None: unless the device is the CPU.
    """

    def __init__(self, cache: PagedKVCache, num_blocks: int, *, pinned: bool | None = None):
        leaf, num_leaves = cache.k[0], 2 * len(cache.k)
        self.blocks = np.empty((num_blocks, num_leaves, *leaf.shape[1:]), leaf.dtype)
        block_bytes = math.prod(self.blocks.shape[1:]) * self.blocks.itemsize
        largest = max(1, min(MAX_STEP_BLOCKS, STAGING_BYTES // block_bytes, num_blocks))
        sizes = (size for size in (1, 4, 16, MAX_STEP_BLOCKS) if size < largest)
        self.buckets = [*sizes, largest] if num_blocks else []
        self._is_pinned = jax.default_backend() != "cpu" if pinned is None else pinned

    def parts(self, moves: Sequence[tuple[int, int]]) -> Iterator[BlockMoves]:
        """Moves between (device block, host block), cut into steps of N blocks, N a bucket.

        A step is filled up with at most as many null blocks as it moves blocks.
        """
        start = 0
        while start < len(moves):
            num_left = min(len(moves) - start, self.buckets[-1])
            bucket = bucket_of(self.buckets, num_left)
            if 2 * num_left < bucket:
                bucket = max((size for size in self.buckets if size < bucket), default=bucket)
            blocks, hosts = zip(*moves[start : start + bucket], strict=True)
            yield padded(blocks, bucket), list(hosts)
            start += bucket

    def put(self, hosts: list[int], staged: Array) -> None:
        """Wait for blocks that are read, `[N, 2 * layers, Hk, S, D]`, and keep them."""
        if self._is_pinned:
            staged = jax.device_put(staged, staged.sharding.with_memory_kind("pinned_host"))
        self.blocks[hosts] = np.asarray(staged)[: len(hosts)]

    def get(self, hosts: list[int], bucket: int) -> np.ndarray:
        """Contents of host blocks, to be written: `[bucket, 2 * layers, Hk, S, D]`."""
        staged = np.zeros((bucket, *self.blocks.shape[1:]), self.blocks.dtype)
        np.take(self.blocks, hosts, axis=0, out=staged[: len(hosts)])
        return staged
