"""One sequence's preemption: its blocks are moved out and in, or its tokens are prefilled."""

import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import Engine, SamplingParams
from paged_jax.executor.swap_pool import (
    MAX_STEP_BLOCKS,
    STAGING_BYTES,
    SwapPool,
    read_step,
    write_step,
)
from paged_jax.loading import LoadedModel
from paged_jax.observability.observer import IterationStats
from paged_jax.simulation.cost_model import RooflineCost, StepWork
from paged_jax.simulation.setups import find_gpu, find_model_shape

# Modelled for OPT-13B on an A100, by the simulator's cost model

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


# Measured with a model on this machine


class Mover:
    """A cache as the engine's and a pool in host memory, between which a sequence's blocks move."""

    def __init__(self, engine: Engine, seed: int):
        num_blocks = engine.num_blocks
        self._cache = jax.tree.map(jnp.zeros_like, engine.executor.cache)
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
    model: LoadedModel, num_tokens: int, block_size: int, *, rounds: int, seed: int
) -> dict[str, Any]:
    """Move the blocks of so many tokens, and compute the same tokens in one prefill.

    Returns medians over the rounds; a100_… is modelled for OPT-13B.
    """
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
    mover = Mover(engine, seed)
    seconds = []
    with closing(engine):
        for _ in range(1 + rounds):
            out_s, in_s = mover.move(each_alone=False)
            each_s = sum(mover.move(each_alone=True))
            engine.generate(prompt.tolist(), params, progress=False)
            seconds.append((out_s, in_s, each_s, steps[-1].device_s))
    timed = seconds[1:]  # the first round compiles
    out_ms, in_ms, each_ms, recompute_ms = (1e3 * np.median(timed, axis=0)).tolist()
    return {
        "block_size": block_size,
        "blocks": num_blocks,
        "out_ms": out_ms,
        "in_ms": in_ms,
        "swap_ms": out_ms + in_ms,
        "each_ms": each_ms,  # out and in, a step for each block
        "recompute_ms": recompute_ms,
        "a100_copies": num_copies(num_tokens, block_size),  # each way, one for a block and layer
        "a100_each_ms": 1e3 * swap_s(num_tokens, block_size),
        "a100_swap_ms": 1e3 * gathered_swap_s(num_tokens, block_size),
        "a100_recompute_ms": 1e3 * recompute_s(num_tokens, block_size),
    }
