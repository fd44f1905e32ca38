"""One sequence's preemption, measured: its blocks moved out and in, or its tokens prefilled."""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from paged_jax import Engine, SamplingParams, kv_cache
from paged_jax.engine_core import IterationStats
from paged_jax.executor.swap_pool import SwapPool, read_step, write_step
from paged_jax.loading import LoadedModel


class Measured(NamedTuple):
    """Medians over the rounds, in milliseconds."""

    out_ms: float
    in_ms: float
    each_ms: float  # out and in, a step for each block
    recompute_ms: float


class Mover:
    """A cache of the model's and a pool in host memory, between which a sequence's blocks move."""

    def __init__(self, engine: Engine, num_blocks: int, seed: int):
        cache = engine.executor.cache
        shape, dtype = cache.k[0].shape, cache.k[0].dtype
        self._cache = kv_cache.create(
            num_layers=len(cache.k),
            num_blocks=num_blocks + 1,
            num_kv_heads=shape[1],
            block_size=shape[2],
            head_dim=shape[3],
            dtype=dtype,
        )
        self._pool = SwapPool(self._cache, num_blocks)
        self._buckets = self._pool.buckets
        rng = np.random.default_rng(seed)  # neither blocks nor host blocks lie side by side
        blocks, hosts = rng.permutation(num_blocks) + 1, rng.permutation(num_blocks)
        self._moves = list(zip(blocks.tolist(), hosts.tolist(), strict=True))

    def move(self, *, each_alone: bool) -> tuple[float, float]:
        """Seconds out and seconds in; `each_alone`: a step for each block, as in the paper."""
        pool = self._pool
        pool.buckets = [1] if each_alone else self._buckets
        start = time.perf_counter()
        for blocks, hosts in pool.parts(self._moves):
            pool.put(hosts, read_step(self._cache, blocks))
        middle = time.perf_counter()
        for blocks, hosts in pool.parts(self._moves):
            self._cache = write_step(self._cache, pool.get(hosts, len(blocks)), blocks)
        jax.block_until_ready(jax.tree.leaves(self._cache))
        return middle - start, time.perf_counter() - middle


def measure(
    model: LoadedModel,
    num_tokens: int,
    block_size: int,
    *,
    rounds: int,
    seed: int,
    on_round: Callable[[], object],
) -> Measured:
    """Move the blocks of so many tokens, and compute the same tokens in one prefill."""
    num_blocks = -(-num_tokens // block_size)
    engine = Engine(
        model,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=1,
        max_num_batched_tokens=num_tokens,
        max_model_len=num_tokens + 1,
        enable_prefix_caching=False,
        preemption_mode="recompute",
        seed=seed,
        warm_up=False,
    )
    steps: list[IterationStats] = []
    engine.core.on_iteration = steps.append
    prompt = np.random.default_rng(seed).integers(engine.config.vocab_size, size=num_tokens)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    mover = Mover(engine, num_blocks, seed)
    seconds: list[tuple[float, float, float, float]] = []
    try:
        for number in range(1 + rounds):
            out_s, in_s = mover.move(each_alone=False)
            each_s = sum(mover.move(each_alone=True))
            engine.generate(prompt.tolist(), params, progress=False)
            if number:  # the first one compiles
                seconds.append((out_s, in_s, each_s, steps[-1].device_s))
                on_round()
    finally:
        engine.close()
    return Measured(*(1e3 * np.median(seconds, axis=0)).tolist())
