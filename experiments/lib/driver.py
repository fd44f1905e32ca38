"""Replays a workload on an engine in real time."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace

from tqdm import tqdm

from paged_jax.engine.engine import Engine
from paged_jax.executor.compilation import count_compilations
from paged_jax.observability.observer import IterationStats
from paged_jax.outputs import RequestOutput
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.checks import num_blocks_needed
from paged_jax.scheduling.request import Request
from paged_jax.workloads import WorkloadRequest

REDRAW_S = 0.25
ONE_SAMPLE = SamplingParams()


class ServingProgress:
    """A bar of the requests that have ended, with tokens/s, sequences and use of the KV pool."""

    def __init__(self, num_requests: int):
        self._bar = tqdm(total=num_requests, desc="serving", unit="request")
        self._start_s: float | None = None
        self._drawn_s = 0.0
        self._num_tokens = 0
        self.advance = self._bar.update  # by the number of requests that have ended
        self.close = self._bar.close

    def show(self, stats: IterationStats) -> None:
        """Take in an iteration; its figures are drawn a few times a second."""
        if self._start_s is None:
            self._start_s = stats.start_s
        self._num_tokens += stats.num_sampled
        now = stats.start_s + stats.wall_s
        if now - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now
        usage = stats.usage
        self._bar.set_postfix_str(
            f"{self._num_tokens / (now - self._start_s):.0f} tokens/s, "
            f"{stats.num_running} running, {stats.num_waiting} waiting, "
            f"KV {1 - (usage.free + usage.external) / usage.total:.0%}"
        )


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
    block_size, num_blocks = memory.block_size, memory.num_total_blocks
    needs = [
        num_blocks_needed(
            Request("", request.prompt_token_ids, _params(request, params), 0.0, 0), memory
        )
        for request in requests
    ]
    if unfit := [count for count in needs if count > num_blocks - memory.num_pinned_blocks]:
        limit = f"max_model_len={num_blocks * block_size + 1}" if beam_width == 1 else "max_tokens"
        raise ValueError(
            f"the pool is too small for {len(unfit)} of {len(requests)} requests: the longest can "
            f"need {max(unfit)} blocks of {block_size} slots, the pool has "
            f"{num_blocks}; give it more blocks, or leave longer requests out with {limit}"
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
    engine.core.on_iteration = steps.append
    clock = engine.core.clock
    with count_compilations() as compiled, closing(ServingProgress(len(requests))) as progress:
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
                    progress.advance(1)
            if engine.has_work:
                begin, index = clock(), len(steps)
                with mark(index):
                    finished = engine.step()
                step_s += clock() - begin
                outputs |= {output.request_id: output for output in finished}
                progress.advance(len(finished))
                if len(steps) > index:
                    progress.show(steps[-1])
            elif upcoming:
                time.sleep(max(0.0, start + upcoming[0][1].arrival_s - now))
                idle_s += clock() - now
        wall_s = clock() - start
    served = [
        ServedRequest(
            request_id, request, priority, outputs.get(request_id), refusals.get(request_id)
        )
        for request_id, request, priority in zip(ids, requests, priorities, strict=True)
    ]
    return ServedRun(served, steps, start, wall_s, idle_s, step_s, compiled.programs)


def _params(request: WorkloadRequest, params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
