"""A loop that runs a given number of sequences all the time, of random lengths."""

from collections.abc import Iterator

import numpy as np

from experiments.host.sleeping_device import SleepingDevice
from paged_jax.config import EngineConfig
from paged_jax.engine_core import EngineCore
from paged_jax.memory.block_manager import BlockManager
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sampling_params import SamplingParams
from paged_jax.scheduling.scheduler import Scheduler

MAX_PREFILL_SEQS = 16
MAX_BATCHED_TOKENS = 8192


def make_loop(
    num_seqs: int,
    *,
    block_size: int,
    mean_prompt: int,
    mean_output: int,
    device_s: float = 0.0,
    is_pipelined: bool = False,
) -> tuple[EngineCore, SleepingDevice]:
    """An idle loop and its device, with memory for the longest sequences of `endless_requests`."""
    max_len = 2 * (mean_prompt + mean_output)
    memory = BlockManager(num_seqs * -(-max_len // block_size) + 1, block_size)
    device = SleepingDevice(
        memory,
        max_num_seqs=num_seqs,
        max_model_len=max_len,
        max_prefill_seqs=MAX_PREFILL_SEQS,
        device_s=device_s,
    )
    scheduler = Scheduler(
        memory,
        EngineConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=max_len,
            max_prefill_seqs=MAX_PREFILL_SEQS,
        ),
        eos_token_ids=(),
    )
    return EngineCore(scheduler, device, is_pipelined=is_pipelined), device


def endless_requests(seed: int, *, mean_prompt: int, mean_output: int) -> Iterator[Request]:
    """Lengths are uniform; no two prompts begin alike, so that none finds another's blocks."""
    rng = np.random.default_rng(seed)
    number = 0
    while True:
        prompt = int(rng.integers(1, 2 * mean_prompt))
        params = SamplingParams(max_tokens=int(rng.integers(1, 2 * mean_output)))
        yield Request(str(number), (number,) * prompt, params, 0.0, seed=number)
        number += 1
