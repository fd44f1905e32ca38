"""Replays a workload on an engine in real time."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from paged_jax.engine.engine import Engine
from paged_jax.executor.compilation import count_compilations
from paged_jax.observability.observer import IterationStats
from paged_jax.outputs import RequestOutput
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.checks import num_blocks_needed
from paged_jax.scheduling.request import Request
from paged_jax.workloads import WorkloadRequest

ONE_SAMPLE = SamplingParams()


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request and what became of it: an output, or the engine's reason to refuse it."""

    request_id: str
    request: WorkloadRequest
    priority: int
    output: RequestOutput | None
    refusal: str | None


@dataclass(frozen=True)
class ServedRun:
    """A workload that has been served. Times in seconds."""

    served: list[ServedRequest]  # by arrival
    steps: list[IterationStats]
    start_s: float  # on the engine's clock
    wall_s: float
    idle_s: float  # slept, with nothing to do before the next arrival
    step_s: float  # in `Engine.step`: the iterations, and the delivery of their tokens
    num_compilations: int


def require_fitting(
    engine: Engine, requests: Sequence[WorkloadRequest], params: SamplingParams = ONE_SAMPLE
) -> None:
    """ValueError if the engine can never hold one of the requests, even alone."""
    beam_width = params.beam_width or 1
    if beam_width > engine.max_num_seqs:
        raise ValueError(
            f"beam_width {beam_width} is more than max_num_seqs {engine.max_num_seqs}, and beams "
            "run together"
        )
    memory = engine.core.scheduler.memory
    num_blocks = memory.num_total_blocks
    alone = [
        Request("", request.prompt_token_ids, _params(request, params), 0.0, 0)
        for request in requests
    ]
    needs = [num_blocks_needed(request, memory) for request in alone]
    if unfit := [count for count in needs if count > num_blocks - memory.num_pinned_blocks]:
        length = num_blocks * memory.block_size + 1
        limit = f"max_model_len={length}" if beam_width == 1 else "max_tokens"
        raise ValueError(
            f"the pool is too small for {len(unfit)} of {len(requests)} requests: the longest can "
            f"need {max(unfit)} blocks of {memory.block_size} slots, the pool has {num_blocks}; "
            f"give it more blocks, or leave longer requests out with {limit}"
        )


def serve(
    engine: Engine,
    requests: Sequence[WorkloadRequest],
    params: SamplingParams,
    *,
    priorities: Sequence[int] | None = None,
    timeout_s: float | None = None,
    mark: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> ServedRun:
    """Add each request when it arrives and step until all have ended.

    requests: by arrival; each brings its output's length and says whether EOS ends it.
    params: the other sampling parameters, the same for all.
    priorities: one for each request; by default all have the same.
    timeout_s: a request ends with what it has this long after its arrival.
    mark: entered around each step of the engine, with its number, as a profiler wants it.

    A request that the engine refuses is recorded, and the others go on. The engine's
    `on_iteration` is taken over.
    """
    ids = [f"request-{index}" for index in range(len(requests))]
    priorities = [0] * len(requests) if priorities is None else priorities
    upcoming = deque(zip(ids, requests, priorities, strict=True))
    outputs: dict[str, RequestOutput] = {}
    refusals: dict[str, str] = {}
    steps: list[IterationStats] = []
    idle_s = step_s = 0.0
    num_tokens = 0
    engine.core.on_iteration = steps.append
    clock = engine.core.clock
    # A few times a second, the bar is drawn again.
    bar = tqdm(total=len(requests), desc="serving", unit="request", mininterval=0.25, miniters=0)
    with count_compilations() as compiled, bar:
        start = clock()
        while upcoming or engine.has_work:
            now = clock()
            while upcoming and start + upcoming[0][1].arrival_s <= now:
                request_id, request, priority = upcoming.popleft()
                try:
                    engine.add_request(
                        request_id,
                        request.prompt_token_ids,
                        _params(request, params),
                        arrival_time=start + request.arrival_s,
                        priority=priority,
                        timeout_s=timeout_s,
                    )
                except ValueError as error:
                    refusals[request_id] = str(error)
                    bar.update()
            if engine.has_work:
                begin, index = clock(), len(steps)
                with mark(index):
                    finished = engine.step()
                step_s += clock() - begin
                outputs |= {output.request_id: output for output in finished}
                if len(steps) > index:
                    num_tokens += steps[-1].num_sampled
                    speed = f"{num_tokens / (clock() - start):.0f} tokens/s"
                    bar.set_postfix_str(f"{speed}, {_load(steps[-1])}", refresh=False)
                bar.update(len(finished))
            elif upcoming:
                time.sleep(max(0.0, start + upcoming[0][1].arrival_s - now))
                idle_s += clock() - now
        wall_s = clock() - start
    served = [
        ServedRequest(name, request, priority, outputs.get(name), refusals.get(name))
        for name, request, priority in zip(ids, requests, priorities, strict=True)
    ]
    return ServedRun(served, steps, start, wall_s, idle_s, step_s, compiled.programs)


def _params(request: WorkloadRequest, params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)


def _load(stats: IterationStats) -> str:
    usage = stats.usage
    held = 1 - (usage.free + usage.external) / usage.total
    return f"{stats.num_running} running, {stats.num_waiting} waiting, KV {held:.0%}"


@contextmanager
def with_and_without_cache(model: str, **options: Any) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that differ in their prefix cache alone, each warm; closed at the end."""
    with (
        closing(Engine(model, **options, enable_prefix_caching=True)) as with_cache,
        closing(Engine(model, **options, enable_prefix_caching=False)) as without,
    ):
        for engine in (with_cache, without):
            engine.warm_up()
            engine.generate([0, 1], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
        yield with_cache, without
