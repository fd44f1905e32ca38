"""Fits the simulator's step times to a real engine on this machine.

    python -m experiments.simulator.calibrate --quick
    python -m experiments.simulator.calibrate
    python -m experiments.simulator.calibrate --model=path/to/model --max_num_seqs=32

An engine serves workloads of random lengths in which steps of every size occur. The times of its
iterations are fitted by least squares (`paged_jax/simulation/calibrated.py`), all rounds together;
residuals are also given for each round as the others predict it, which tells fit from noise. The
machine should have nothing else to do; other work disturbs --clock=cpu less.

Expect half a minute with --quick and a few minutes without on two CPU cores; the first run compiles
all steps before that. `CalibratedCost.load` reads calibration.json; calibrate.png shows the fit.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lib import Options, figures, grid, option, report, run
from experiments.lib.driver import require_fitting
from experiments.lib.fake_devices import BatchRecorder
from experiments.lib.options import engine_option, engine_options
from experiments.lib.reporting import environment
from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.executor.buckets import prefill_buckets
from paged_jax.observability.observer import IterationStats
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.simulation.calibrated import CalibratedCost, Measured, StepBuckets
from paged_jax.simulation.cost_model import StepWork
from paged_jax.simulation.run import SimulatedRequest, SimulatedRun, SystemConfig
from paged_jax.workloads import VocabRange, WorkloadRequest
from paged_jax.workloads.request import random_token_ids

# A real engine, the time that it takes for a workload, and the system that simulates it


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


# Calibration


@dataclass(frozen=True, kw_only=True)
class Config(RealEngineOptions):
    rounds: int = option(4, "Each size of a step is measured so often.", quick=2, least=2)


MAX_PROMPT_TOKENS = 320
OUTPUT_TOKENS = (4, 20)


@cache
def prepared(config: RealEngineOptions) -> RealEngine:
    """An engine that has run each step once, which loads what was compiled."""
    real = config.make_engine()
    real.engine.warm_up()
    measure_round(real, config.seed)
    return real


def measure(number: int, config: Config) -> list[Measured]:
    return measure_round(prepared(config), config.seed + number)


def measure_round(real: RealEngine, seed: int) -> list[Measured]:
    """One round: each workload on its own."""
    vocab = VocabRange(0, real.engine.config.vocab_size)
    workloads = calibration_workloads(real.buckets, real.system, vocab, seed)
    measured: list[Measured] = []
    for requests in tqdm(workloads, desc="calibration", unit="workload", leave=False):
        measured += real.serve(requests)[1]
    return measured


def calibration_workloads(
    buckets: StepBuckets, system: SystemConfig, vocab: VocabRange, seed: int
) -> list[list[WorkloadRequest]]:
    """Workloads to be served one after the other, the requests of each all at once.

    A prefill step of each size is filled by a prompt, and by one after a chunk of the largest size.
    A decode step of each size gets as many sequences of random lengths, a step that samples after
    prompts as many prompts that are computed together.
    """
    rng = np.random.default_rng([seed, 0x63616C])
    room = system.max_model_len - OUTPUT_TOKENS[1]
    workloads: list[list[WorkloadRequest]] = []

    def request(num_prompt: int, num_output: int) -> WorkloadRequest:
        return WorkloadRequest(tuple(random_token_ids(rng, num_prompt, vocab)), num_output)

    for low, high in zip((0, *buckets.prefill), buckets.prefill, strict=False):
        for before in (0, buckets.prefill[-1]):
            # More than three quarters full: the scheduler leaves less to the size below.
            num_tokens = before + int(rng.integers(low + 1 + 3 * (high - low) // 4, high + 1))
            if num_tokens <= room:
                workloads.append([request(num_tokens, 2)])
    for size in buckets.decode:
        prompts = rng.integers(8, min(MAX_PROMPT_TOKENS, room) + 1, size=size)
        outputs = rng.integers(*OUTPUT_TOKENS, endpoint=True, size=size)
        workloads.append([request(*each) for each in zip(prompts, outputs, strict=True)])
    for size in buckets.head:
        if size <= system.max_prefill_seqs:  # more at a time are forks
            longest = max(1, min(room, system.max_num_batched_tokens // size))
            workloads.append([request(n, 2) for n in rng.integers(1, longest + 1, size=size)])
    return workloads


def facts(measured: Sequence[Measured]) -> dict[str, Any]:
    return {"iterations": len(measured), "seconds": sum(seconds for _, seconds in measured)}


def held_out(rounds: Sequence[list[Measured]], buckets: StepBuckets) -> Iterator[float]:
    """For each round the median absolute error of what the other rounds predict, in percent."""
    for left_out, measured in enumerate(rounds):
        others = [each for i, r in enumerate(rounds) if i != left_out for each in r]
        cost = CalibratedCost.fit(others, buckets)
        yield 100 * cost.residuals(measured).median_absolute


def plot(cost: CalibratedCost, measured: Sequence[Measured], out_dir: str) -> None:
    """Predicted against measured times, a point for each iteration."""
    times = 1e3 * np.array([seconds for _, seconds in measured])
    predicted = 1e3 * np.array([cost.step_s(work) for work, _ in measured])
    has_prefill = np.array([bool(work.prefills) for work, _ in measured])
    ends = [min(times.min(), predicted.min()), max(times.max(), predicted.max())]
    labels = ("measured (ms)", "predicted (ms)")
    with figures.panel(out_dir, "calibrate.png", *labels, size=(5, 5)) as axes:
        for label, chosen in (("decoding only", ~has_prefill), ("with a prefill", has_prefill)):
            axes.loglog(times[chosen], predicted[chosen], ".", alpha=0.5, label=label)
        axes.loglog(ends, ends, "k-", linewidth=0.8)


def main(config: Config) -> None:
    with closing(prepared(config)) as real:
        numbers = range(config.rounds)
        rounds = grid(partial(measure, config=config), numbers, config, unit="round")
    measured = [each for one_round in rounds for each in one_round]
    cost = CalibratedCost.fit(measured, real.buckets)
    residuals = cost.residuals(measured)
    found: dict[str, Any] = {"measured": facts(measured), "residuals": asdict(residuals)}
    cost.save(
        Path(config.out_dir) / "calibration.json",
        model=real.engine.config.name,
        clock=config.clock,
        environment=environment(),
        **found,
    )
    counts = Counter(name for work, _ in measured for name in cost.buckets.features(work))
    cases = [
        {"term": name, "iterations": counts[name], "ms": 1e3 * cost.seconds[name]}
        for name in sorted(cost.seconds, key=_order)
    ]
    errors = list(held_out(rounds, real.buckets))
    title = "Time of an iteration: the sum of"
    report(title, cases, config, **found, held_out_median_percent=errors)
    print(
        f"{residuals.num_iterations} iterations: predictions are off by "
        f"{100 * residuals.median_absolute:.1f} % in the median, "
        f"{100 * residuals.p90_absolute:.1f} % at p90; their sum by "
        f"{100 * residuals.total_relative:+.1f} %. Rounds predicted by the others, medians: "
        f"{', '.join(f'{error:.1f}' for error in errors)} %."
    )
    plot(cost, measured, config.out_dir)


def _order(term: str) -> tuple[str, int]:
    """Sorts steps of a kind by size."""
    kind, _, size = term.rpartition(" ")
    return (kind, int(size)) if size.isdigit() else (term, 0)


if __name__ == "__main__":
    run(main, Config)
