"""The scheduler and the memory manager alone, without a model: memory at any scale on a laptop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from paged_jax.engine_core import EngineCore
from paged_jax.executor.interface import Executor
from paged_jax.memory.block_manager import BlockManager
from paged_jax.memory.interface import MemoryManager
from paged_jax.memory.usage import MemoryUsage
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sampling_params import SamplingParams
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.workloads import WorkloadRequest


@dataclass(frozen=True)
class Scale:
    """What a scheduler and its memory are given; names as in `paged_jax.Engine`."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_prefill_seqs: int = 16


def simulate(
    requests: Sequence[WorkloadRequest],
    params: SamplingParams,
    scale: Scale,
    executor_of: Callable[[MemoryManager], Executor],
    *,
    description: str,
) -> list[MemoryUsage]:
    """Serve requests that are all there at the start; returns the memory's use in each iteration.

    As in the paper, requests share nothing with each other: prefix caching is off.
    """
    memory = BlockManager(1 + scale.num_blocks, scale.block_size, enable_prefix_caching=False)
    scheduler = Scheduler(
        memory,
        max_num_seqs=scale.max_num_seqs,
        max_num_batched_tokens=scale.max_num_batched_tokens,
        max_model_len=scale.max_model_len,
        max_prefill_seqs=scale.max_prefill_seqs,
        eos_token_ids=(),
        enable_prefix_caching=False,
    )
    usages: list[MemoryUsage] = []
    core = EngineCore(
        scheduler, executor_of(memory), on_iteration=lambda stats: usages.append(stats.usage)
    )
    for index, request in enumerate(requests):
        own = replace(params, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
        scheduler.add(Request(str(index), request.prompt_token_ids, own, 0.0, seed=index))
    with tqdm(total=len(requests), desc=description, unit="request", leave=False) as bar:
        while scheduler.has_work:
            iteration = core.step()
            core.report(iteration)
            ended = {seq.request.request_id: seq.request for seq in iteration.finished}
            bar.update(sum(request.is_finished for request in ended.values()))
    return usages
