"""A real engine, the time that it takes for a workload, and the system that simulates it."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from experiments.lib import Options, engine_option, engine_options, option
from experiments.lib.driver import require_fitting
from experiments.lib.fake_devices import BatchRecorder
from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.executor.buckets import prefill_buckets
from paged_jax.observability.observer import IterationStats
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.simulation.calibrated import Measured, StepBuckets
from paged_jax.simulation.cost_model import StepWork
from paged_jax.simulation.run import SimulatedRequest, SimulatedRun, SystemConfig
from paged_jax.workloads import WorkloadRequest


class WallClock:
    """Seconds as they pass. Whatever else the machine does makes a run longer."""

    def __call__(self) -> float:
        return time.perf_counter()

    def idle_until(self, time_s: float) -> None:
        """Let time pass without work."""
        time.sleep(max(0.0, time_s - self()))


class CpuClock(WallClock):
    """Time that all threads compute, which compares on a busy machine; idle time is skipped."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._skipped_s

    def idle_until(self, time_s: float) -> None:
        self._skipped_s += max(0.0, time_s - self())


CLOCKS: dict[str, type[WallClock]] = {"wall": WallClock, "cpu": CpuClock}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
MAX_PREFILL_SEQS = 16


@dataclass(frozen=True, kw_only=True)
class RealEngineOptions(Options):
    """The options of an experiment that measures a real engine."""

    model: str = option("smollm2", "The model's name or path.")
    block_size: int = engine_option("block_size")
    num_blocks: int | None = engine_option("num_blocks")
    max_num_seqs: int = option(16, "So many sequences run at a time.", quick=8, least=1)
    max_num_batched_tokens: int = engine_option("max_num_batched_tokens")
    max_model_len: int = engine_option("max_model_len", 1024)
    clock: str = option("wall", "Time is wall time, or CPU time of all threads.", choices=CLOCKS)

    def make_engine(self) -> "RealEngine":
        """The engine that the options describe."""
        return RealEngine(self.model, CLOCKS[self.clock](), **engine_options(self))


class RealEngine:
    """An engine whose runs `clock` measures; requests share nothing, so prefixes are not cached."""

    def __init__(self, model: Any, clock: WallClock, *, max_num_seqs: int, **options: Any):
        defaults: dict[str, Any] = {
            "max_prefill_seqs": min(MAX_PREFILL_SEQS, max_num_seqs),
            "enable_prefix_caching": False,
            "preemption_mode": "recompute",
            "pipelined": False,
        }
        self.engine = Engine(model, max_num_seqs=max_num_seqs, **defaults | options)
        self._clock = self.engine.core.clock = clock
        block_size = self.engine.block_size
        self._recorder = self.engine.core.executor = BatchRecorder(
            self.engine.executor, lambda batch: [StepWork.of(batch, block_size)]
        )

    @property
    def buckets(self) -> StepBuckets:
        """The sizes of the steps that the executor has compiled."""
        sizes: dict[str, list[int]] = {"decode": [], "prefill": [], "head": []}
        for name in self.engine.executor.lowerings():
            step, size = name.split()
            sizes.get(step, []).append(int(size))
        return StepBuckets(**{step: tuple(sorted(found)) for step, found in sizes.items()})

    @property
    def system(self) -> SystemConfig:
        """The system that simulates this engine."""
        engine = self.engine
        return SystemConfig(
            **vars(engine.options)
            | {
                "num_slots": engine.num_blocks * engine.block_size,
                "swap_space_blocks": engine.num_swap_blocks,
                "prefill_sizes": tuple(prefill_buckets(engine.max_num_batched_tokens)),
            }
        )

    def serve(
        self, requests: Sequence[WorkloadRequest], description: str | None = None
    ) -> tuple[SimulatedRun, list[Measured]]:
        """Add each request when it arrives and step until all have ended, as `simulate` does.

        With a `description` a progress bar shows it. Returns the run, with times from its start,
        and each iteration's work and seconds, which include the driver's. ValueError if a request
        can never be held.
        """
        require_fitting(self.engine, requests)
        engine, clock = self.engine, self._clock
        iterations: list[IterationStats] = []
        engine.core.on_iteration = iterations.append
        before = _counts(engine.core.scheduler)
        upcoming = deque(enumerate(requests))
        outputs: dict[str, RequestOutput] = {}
        self._recorder.take()
        start = clock()
        disable, total = description is None, len(requests)
        with tqdm(None, description, total, False, unit="request", disable=disable) as bar:
            while upcoming or engine.has_work:
                begin = clock()
                while upcoming and start + upcoming[0][1].arrival_s <= begin:
                    number, request = upcoming.popleft()
                    params = replace(GREEDY, max_tokens=request.max_tokens)
                    given = (str(number), request.prompt_token_ids, params)
                    engine.add_request(*given, arrival_time=start + request.arrival_s)
                if engine.has_work:
                    ended = engine.step()
                    outputs |= {output.request_id: output for output in ended}
                    bar.update(len(ended))
                    times: dict[str, Any] = {"start_s": begin - start, "wall_s": clock() - begin}
                    iterations[-1] = replace(iterations[-1], **times)
                else:
                    clock.idle_until(start + upcoming[0][1].arrival_s)
        counts = _counts(engine.core.scheduler)
        run = SimulatedRun(
            [_outcome(each, outputs[str(n)], start) for n, each in enumerate(requests)],
            iterations=iterations,
            duration_s=clock() - start,
            sharing=engine.sharing_stats,
            **{name: count - before[name] for name, count in counts.items()},
        )
        seconds = [stats.wall_s for stats in iterations]
        return run, list(zip(self._recorder.take(), seconds, strict=True))

    def close(self) -> None:
        self.engine.close()


def _counts(scheduler: Scheduler) -> dict[str, int]:
    """The scheduler's counts since the engine was made, by the names of `SimulatedRun`."""
    counters = scheduler.counters
    names = ("num_preemptions", "num_preemptions_by_swap", "num_recomputed_tokens")
    num_swapped = counters.num_swapped_out_blocks + counters.num_swapped_in_blocks
    return {name: getattr(counters, name) for name in names} | {"num_swapped_blocks": num_swapped}


def _outcome(request: WorkloadRequest, output: RequestOutput, start_s: float) -> SimulatedRequest:
    metrics = output.metrics
    assert metrics.first_token_s is not None
    assert metrics.last_token_s is not None
    return SimulatedRequest(
        *(request.arrival_s, request.num_prompt_tokens, request.max_tokens),
        first_token_s=metrics.first_token_s - start_s,
        last_token_s=metrics.last_token_s - start_s,
        num_output_tokens=len(output.outputs[0].token_ids),
        num_sequences=len(output.outputs),
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=metrics.num_preemptions,
    )
