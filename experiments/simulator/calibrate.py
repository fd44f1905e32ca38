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

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lib import figures, grid, option, report, run
from experiments.lib.reporting import environment
from experiments.simulator.real_engine import RealEngine, RealEngineOptions
from paged_jax.simulation.calibrated import CalibratedCost, Measured, StepBuckets
from paged_jax.simulation.run import SystemConfig
from paged_jax.workloads import VocabRange, WorkloadRequest
from paged_jax.workloads.request import random_token_ids


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
