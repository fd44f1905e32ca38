"""The scheduler and the memory manager alone, without a model: memory at any scale on a laptop."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tqdm import tqdm

from paged_jax.engine_core import EngineCore
from paged_jax.executor.interface import Executor
from paged_jax.memory.interface import MemoryManager
from paged_jax.memory.usage import MemoryUsage
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.sampling_params import SamplingParams
from paged_jax.simulation.system import SystemConfig
from paged_jax.workloads import WorkloadRequest


def simulate(
    requests: Sequence[WorkloadRequest],
    params: SamplingParams,
    system: SystemConfig,
    executor_of: Callable[[MemoryManager], Executor],
    *,
    description: str,
) -> list[MemoryUsage]:
    """Serve requests that are all there at the start; returns the memory's use in each iteration.

    As in the paper, requests share nothing with each other: leave the prefix cache off.
    """
    scheduler = system.scheduler()
    usages: list[MemoryUsage] = []
    core = EngineCore(
        scheduler,
        executor_of(scheduler.memory),
        on_iteration=lambda stats: usages.append(stats.usage),
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
