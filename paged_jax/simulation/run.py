"""A workload served by a simulated system on a virtual clock: the system, the run, its results."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from tqdm import tqdm

from paged_jax.config import EngineConfig, PreemptionMode
from paged_jax.engine.core import EngineCore
from paged_jax.memory.policies import make_memory
from paged_jax.memory.usage import SharingStats
from paged_jax.observability.observer import Iteration, IterationStats
from paged_jax.sampling_params import SamplingParams
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.simulation.cost_model import CostModel
from paged_jax.simulation.executor import BeamCandidates, SimulatedExecutor, VirtualClock
from paged_jax.workloads import WorkloadRequest


@dataclass(frozen=True, kw_only=True)
class SystemConfig(EngineConfig):
    """A system to simulate: an engine's options, with vLLM's defaults at the paper's time.

    `num_slots`: KV slots (tokens) of its memory, which has as many whole blocks as fit in them; it
        counts, and not `num_blocks`.
    `prefill_sizes`: token counts that an executor pads prefill steps to; none if it pads nothing.
    """

    num_slots: int
    prefill_sizes: tuple[int, ...] = ()
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    max_model_len: int = 2048
    preemption_mode: PreemptionMode = "recompute"
    swap_space_blocks: int = 0
    enable_prefix_caching: bool = False

    def scheduler(self) -> Scheduler:
        """An idle scheduler over empty memory; ValueError for a system that cannot exist."""
        memory = make_memory(
            self.memory_policy,
            1 + self.num_slots // self.block_size,
            self.block_size,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            num_swap_blocks=self.swap_space_blocks,
        )
        return Scheduler(memory, self, eos_token_ids=(), prefill_sizes=self.prefill_sizes)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request and its outcome. Times in seconds from the start of the run."""

    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    first_token_s: float | None  # None: it got none
    last_token_s: float | None  # None: it has not finished
    num_output_tokens: int  # of each sequence that it returns, so far
    num_sequences: int  # returned to the caller
    num_cached_tokens: int  # prompt tokens in the prefix cache at the first admission
    num_preemptions: int
    refusal: str | None = None  # why it was not taken

    @property
    def finished(self) -> bool:
        return self.last_token_s is not None

    @property
    def latency_s(self) -> float | None:
        """From arrival to last token; None if it has not finished."""
        return None if self.last_token_s is None else self.last_token_s - self.arrival_s

    @property
    def normalised_latency_s(self) -> float | None:
        """Latency per output token (Kwon et al., section 6.1)."""
        latency = self.latency_s
        return None if latency is None else latency / self.num_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """From arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True)
class SimulatedRun:
    """A workload, served. Averages of iterations are over time: a long one weighs more.

    A request that the run's end has cut short is not finished, and part of no latency.
    """

    requests: list[SimulatedRequest]  # all that arrived before the run's end, by arrival
    iterations: list[IterationStats]  # on the virtual clock; the last one cut at the run's end
    duration_s: float
    num_preemptions: int
    num_preemptions_by_swap: int  # the other preemptions are by recompute
    num_recomputed_tokens: int
    num_swapped_blocks: int  # out, and in
    sharing: SharingStats

    @property
    def finished(self) -> list[SimulatedRequest]:
        return [request for request in self.requests if request.finished]

    @property
    def num_refused(self) -> int:
        return sum(request.refusal is not None for request in self.requests)

    @property
    def num_unfinished(self) -> int:
        """Requests that were taken and cut at the run's end, waiting or running."""
        return len(self.requests) - len(self.finished) - self.num_refused

    @property
    def busy_s(self) -> float:
        """Time in iterations; the rest is idle."""
        return sum(stats.wall_s for stats in self.iterations)

    @property
    def requests_per_s(self) -> float:
        """Requests finished per second of the run."""
        return len(self.finished) / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of finished requests, of all their sequences, per second of the run."""
        counts = [request.num_output_tokens * request.num_sequences for request in self.finished]
        return sum(counts) / self.duration_s

    @property
    def mean_batch_size(self) -> float:
        """Sequences that iterations computed for, averaged over the time of the iterations."""
        return self._over_time([s.num_decodes + s.num_prefill_seqs for s in self.iterations])

    @property
    def memory_shares(self) -> dict[str, float]:
        """Categories of `MemoryUsage`, as fractions of the pool over the time of the iterations."""
        shares = [stats.usage.shares() for stats in self.iterations]
        names = shares[0] if shares else ()
        return {name: self._over_time([share[name] for share in shares]) for name in names}

    @property
    def normalised_latency_s(self) -> float | None:
        """Mean over finished requests (Kwon et al., section 6.1); None if there is none."""
        latencies = self.normalised_latencies_s
        return float(np.mean(latencies)) if latencies else None

    @property
    def normalised_latencies_s(self) -> list[float]:
        """Normalised latencies of the finished requests, by arrival."""
        return _known(request.normalised_latency_s for request in self.requests)

    @property
    def latencies_s(self) -> list[float]:
        """Times from arrival to last token of the finished requests, by arrival."""
        return _known(request.latency_s for request in self.requests)

    @property
    def ttfts_s(self) -> list[float]:
        """Times from arrival to first token of the requests that got one, by arrival."""
        return _known(request.ttft_s for request in self.requests)

    def goodput(self, max_normalised_latency_s: float) -> float:
        """Requests per second of the run that finished within the objective."""
        in_time = [each for each in self.normalised_latencies_s if each <= max_normalised_latency_s]
        return len(in_time) / self.duration_s

    def _over_time(self, values: Sequence[float]) -> float:
        """ValueError if no time has passed in iterations."""
        if not self.busy_s:
            raise ValueError("no iteration took any time, so there is no average over time")
        return float(np.average(values, weights=[stats.wall_s for stats in self.iterations]))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


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
    horizon_s: the run ends then, and cuts the requests that still wait or run. None: it ends when
        all requests have.
    seed: seeds the next tokens that beams branch into. Nothing else is random.

    A request that the scheduler refuses is recorded, and the others go on. ValueError for requests
    that are not by arrival and for a system that cannot exist.
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
            survives_faults=False,  # a cost model that raises makes the run worthless
        )
        self.params = params
        self.arrived: list[tuple[Request, str | None]] = []  # (request, why it was refused)
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
        """Queue a request; returns whether it was taken."""
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
        """Note the times of first and last tokens; returns how many requests have finished."""
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
        counters = self.scheduler.counters
        return SimulatedRun(
            requests=[self._outcome(*arrived) for arrived in self.arrived],
            iterations=self.iterations,
            duration_s=end_s,
            num_preemptions=counters.num_preemptions,
            num_preemptions_by_swap=counters.num_preemptions_by_swap,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_swapped_blocks=counters.num_swapped_out_blocks + counters.num_swapped_in_blocks,
            sharing=replace(self.scheduler.memory.stats),
        )

    def _outcome(self, request: Request, refusal: str | None) -> SimulatedRequest:
        name = request.request_id
        return SimulatedRequest(
            arrival_s=request.arrival_time,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.max_tokens,
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
