"""A workload served by a simulated system on a virtual clock."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from tqdm import tqdm

from paged_jax.engine.core import EngineCore
from paged_jax.observability.observer import Iteration, IterationStats
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.request import Request
from paged_jax.simulation.branching import BeamCandidates
from paged_jax.simulation.cost_model import CostModel
from paged_jax.simulation.executor import SimulatedExecutor, VirtualClock
from paged_jax.simulation.results import SimulatedRequest, SimulatedRun
from paged_jax.simulation.system import SystemConfig
from paged_jax.workloads import WorkloadRequest

_ONE_SAMPLE = SamplingParams()


def simulate(
    requests: Sequence[WorkloadRequest],
    system: SystemConfig,
    cost: CostModel,
    *,
    params: SamplingParams = _ONE_SAMPLE,
    horizon_s: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> SimulatedRun:
    """Serve requests as they arrive, by the engine's own loop, scheduler and memory manager.

    requests: by arrival. Outputs have exactly the length asked for, whatever `ignore_eos` says: a
        simulated model has no EOS.
    params: the rest of their sampling parameters.
    horizon_s: when the run ends, whatever is still waiting or running; None: when all is done.
    seed: of the next tokens that beams branch into. Nothing else is drawn.

    A request that the scheduler refuses is recorded, and the others go on. ValueError for requests
    that are not by arrival and for a system that cannot be.
    """
    if any(after.arrival_s < before.arrival_s for before, after in pairwise(requests)):
        raise ValueError("the requests are not ordered by arrival_s")
    if horizon_s is not None and not horizon_s > 0:
        raise ValueError(f"horizon_s must be above 0, got {horizon_s}")
    run = _Run(system, cost, params, seed)
    with tqdm(total=len(requests), unit="request", disable=not progress, leave=False) as bar:
        run.serve(requests, float("inf") if horizon_s is None else horizon_s, bar)
    return run.results(horizon_s)


class _Run:
    """The state of one run."""

    def __init__(self, system: SystemConfig, cost: CostModel, params: SamplingParams, seed: int):
        self.clock = VirtualClock()
        self.iterations: list[IterationStats] = []
        self.scheduler = system.scheduler()
        memory = self.scheduler.memory
        beams = BeamCandidates(np.random.default_rng(seed))
        self.core = EngineCore(
            self.scheduler,
            SimulatedExecutor(memory, cost, self.clock, beams),
            clock=self.clock,
            on_iteration=self.iterations.append,
            survives_faults=False,  # of a cost model, whose figures are worth nothing then
        )
        self.params = params
        self.arrived: list[tuple[Request, str | None]] = []  # with the reason of a refusal
        self.first_token_s: dict[str, float] = {}
        self.last_token_s: dict[str, float] = {}

    def serve(
        self, requests: Sequence[WorkloadRequest], horizon_s: float, bar: "tqdm[Any]"
    ) -> None:
        clock, scheduler = self.clock, self.scheduler
        upcoming = deque(requests)
        while clock() < horizon_s:
            while upcoming and upcoming[0].arrival_s <= clock():
                bar.update(not self._add(upcoming.popleft()))
            if scheduler.has_work:
                iteration = self.core.step()
                self.core.report(iteration)
                if iteration.end_s <= horizon_s:
                    bar.update(self._note(iteration))
            elif upcoming:
                clock.advance_to(min(upcoming[0].arrival_s, horizon_s))
            else:
                return
        for request in upcoming:
            if request.arrival_s >= horizon_s:
                break
            self._add(request)

    def _add(self, request: WorkloadRequest) -> bool:
        """Queue a request; whether it was taken."""
        number = len(self.arrived)
        params = replace(self.params, max_tokens=request.max_tokens, ignore_eos=True)
        queued = Request(
            str(number), request.prompt_token_ids, params, request.arrival_s, seed=number
        )
        refusal = None
        try:
            self.core.add(queued)
        except ValueError as error:
            refusal = str(error)
        self.arrived.append((queued, refusal))
        return refusal is None

    def _note(self, iteration: Iteration) -> int:
        """Take down first and last tokens; returns how many requests have finished."""
        for seq in iteration.batch.first_sampled():
            self.first_token_s.setdefault(seq.request.request_id, iteration.end_s)
        done = {seq.request.request_id: seq.request for seq in iteration.finished}
        done = {name: request for name, request in done.items() if request.is_finished}
        self.last_token_s |= dict.fromkeys(done, iteration.end_s)
        return len(done)

    def results(self, horizon_s: float | None) -> SimulatedRun:
        end_s = self.clock()
        if horizon_s is not None:
            end_s = horizon_s
            if self.iterations and self.clock() > horizon_s:
                last = self.iterations[-1]
                self.iterations[-1] = replace(last, wall_s=horizon_s - last.start_s)
        return SimulatedRun(
            requests=[self._outcome(*arrived) for arrived in self.arrived],
            iterations=self.iterations,
            duration_s=end_s,
            num_preemptions=self.scheduler.counters.num_preemptions,
            num_preemptions_by_swap=self.scheduler.counters.num_preemptions_by_swap,
            num_recomputed_tokens=self.scheduler.counters.num_recomputed_tokens,
            num_swapped_blocks=self.scheduler.counters.num_swapped_out_blocks
            + self.scheduler.counters.num_swapped_in_blocks,
            sharing=replace(self.scheduler.memory.stats),
        )

    def _outcome(self, request: Request, refusal: str | None) -> SimulatedRequest:
        name = request.request_id
        return SimulatedRequest(
            arrival_s=request.arrival_time,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.params.max_tokens,
            first_token_s=self.first_token_s.get(name),
            last_token_s=self.last_token_s.get(name),
            num_output_tokens=_num_output_tokens(request),
            num_sequences=request.params.n,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_preemptions=request.num_preemptions,
            refusal=refusal,
        )


def _num_output_tokens(request: Request) -> int:
    search = request.beam_search
    if search is not None:
        return search.num_tokens
    return max(seq.num_output_tokens for seq in request.sequences)
