"""Is the simulator right? The same workloads on the real engine and simulated, side by side.

    python -m experiments.simulator.validate --quick
    python -m experiments.simulator.validate
    python -m experiments.simulator.validate --clock=cpu --lengths=alpaca --num_requests=24

Two workloads of the same requests:

    at_once   all are there at the start, and memory is short: lengths alone decide which request
              runs in which iteration, so batch sizes, preemptions and every memory slot must be
              the same in each iteration
    poisson   they arrive at --load of the rate that the engine sustains, so that step times
              decide, too

The simulator's step times are calibrated on this machine, on the workloads of
experiments.simulator.calibrate, before and after each round, so that a machine that grows faster or
slower does not count. The table has medians over the rounds. The machine should have nothing else
to do; --clock=cpu counts CPU time instead, also between arrivals.

Expect two minutes with --quick and 20 without on two CPU cores. curves.csv has each iteration.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np

from experiments.lib import figures, option, report, run, write_csv
from experiments.lib.claims import Claim, Results
from experiments.lib.serving_figures import batch_size
from experiments.simulator.calibrate import (
    RealEngine,
    RealEngineOptions,
    facts,
    measure_round,
    prepared,
)
from paged_jax.observability.observer import IterationStats
from paged_jax.simulation.calibrated import CalibratedCost
from paged_jax.simulation.run import SimulatedRun, simulate
from paged_jax.workloads import (
    PUBLISHED_LENGTHS,
    VocabRange,
    WorkloadRequest,
    arrive_poisson,
    build_workload,
)


@dataclass(frozen=True, kw_only=True)
class Config(RealEngineOptions):
    rounds: int = option(3, "Everything is measured so often.", quick=1, least=1)
    num_requests: int = option(40, "So many requests are served.", quick=24, least=2)
    lengths: str = option(
        "sharegpt", "Requests have these lengths.", quick="alpaca", choices=PUBLISHED_LENGTHS
    )
    load: float = option(0.7, "Poisson arrivals have this part of the served rate.", least=0.01)
    num_blocks: int | None = option(300, "The pool has so few blocks.", quick=40, least=1)
    max_model_len: int = option(1024, "Longer requests are left out (tokens).", quick=512, least=1)
    out_dir: str = option("out/validate_simulator", "Folder for the results.")


GOAL_PERCENT = 10

Runs = dict[str, SimulatedRun]  # of each workload
Figure = Callable[[SimulatedRun], float]


def percentile(name: str, percent: float, scale: float = 1.0) -> Figure:
    """A figure of a run: the percentile of a list that it has."""
    return lambda run: scale * float(np.percentile(getattr(run, name), percent))


WITH_GOAL: dict[str, Figure] = {
    "output tokens/s": lambda run: run.output_tokens_per_s,
    "latency p50 (s)": percentile("latencies_s", 50),
    "latency p99 (s)": percentile("latencies_s", 99),
    "normalised latency p50 (ms)": percentile("normalised_latencies_s", 50, 1e3),
    "normalised latency p99 (ms)": percentile("normalised_latencies_s", 99, 1e3),
}
WITHOUT_GOAL: dict[str, Figure] = {
    "time to first token p50 (s)": percentile("ttfts_s", 50),
    "time to first token p99 (s)": percentile("ttfts_s", 99),
    "mean batch size, over time": lambda run: run.mean_batch_size,
    "token states (% of the pool)": lambda run: 100 * run.memory_shares["token_states"],
}
COUNTS = ("prefill_tokens", "preempted", "finished", "running", "waiting")
CURVES: dict[str, Callable[[IterationStats], int]] = {
    "batch size": batch_size,
    **{name.replace("_", " "): attrgetter(f"num_{name}") for name in COUNTS},
    "token states": attrgetter("usage.token_states"),
    **{name: attrgetter(f"usage.{name}") for name in ("reserved", "internal", "free")},
}


def curves(run: SimulatedRun) -> list[tuple[int, ...]]:
    """For each iteration the values of `CURVES`."""
    return [tuple(value(stats) for value in CURVES.values()) for stats in run.iterations]


def first_difference(real: list[tuple[int, ...]], simulated: list[tuple[int, ...]]) -> str | None:
    """Where two runs part; None if they are the same in every iteration."""
    for number, both in enumerate(zip(real, simulated, strict=False)):
        for name, measured, predicted in zip(CURVES, *both, strict=True):
            if measured != predicted:
                return f"iteration {number}: {name} {measured}, simulated {predicted}"
    if len(real) != len(simulated):
        return f"{len(real)} iterations, simulated {len(simulated)}"
    return None


def run_rounds(
    real: RealEngine, requests: list[WorkloadRequest], config: Config
) -> tuple[list[tuple[Runs, Runs]], dict[str, Any]]:
    """The real and the simulated runs of each round; and facts of the calibrations in between."""
    calibrations = [measure_round(real, config.seed)]
    cost = CalibratedCost.fit(calibrations[0], real.buckets)
    rate = config.load * simulate(requests, real.system, cost).requests_per_s
    poisson = arrive_poisson(requests, rate=rate, seed=config.seed)
    workloads = {"at_once": requests, "poisson": poisson}
    rounds: list[tuple[Runs, Runs]] = []
    for number in range(config.rounds):
        served = {name: real.serve(each, name)[0] for name, each in workloads.items()}
        calibrations.append(measure_round(real, config.seed + number + 1))
        cost = CalibratedCost.fit(calibrations[-2] + calibrations[-1], real.buckets)
        simulated = {name: simulate(each, real.system, cost) for name, each in workloads.items()}
        rounds.append((served, simulated))
    measured = [each for calibration in calibrations for each in calibration]
    residuals = CalibratedCost.fit(measured, real.buckets).residuals(measured)
    return rounds, {"rate": rate, "calibration": facts(measured), "residuals": residuals}


def compare(rounds: Sequence[tuple[Runs, Runs]]) -> Iterator[dict[str, Any]]:
    """Medians over the rounds of each figure, and of its difference."""
    for workload, (name, figure) in product(rounds[0][0], (WITH_GOAL | WITHOUT_GOAL).items()):
        pairs = [[figure(runs[workload]) for runs in both] for both in rounds]
        real, simulated = np.median(pairs, axis=0).tolist()
        difference = float(np.median([100 * (predicted / was - 1) for was, predicted in pairs]))
        yield {
            "workload": workload,
            "figure": name,
            "real": real,
            "simulated": simulated,
            "difference_percent": difference,
            # None: the figure has no goal.
            "in_goal": abs(difference) <= GOAL_PERCENT if name in WITH_GOAL else None,
        }


def plot(real: Runs, simulated: Runs, out_dir: str) -> None:
    """Batch size and memory over iterations; latencies of the requests that arrived in turn."""
    figure, [axes] = figures.panels(1, 3, size=(5, 4))
    for label, style, runs in (("real", "-", real), ("simulated", "--", simulated)):
        for panel, name in zip(axes, ("batch size", "token states"), strict=False):
            panel.plot(list(map(CURVES[name], runs["at_once"].iterations)), style, label=label)
            panel.set(xlabel="iteration, all at once", ylabel=name)
        latencies = np.sort(runs["poisson"].latencies_s)
        shares = np.arange(1, 1 + len(latencies)) / len(latencies)
        axes[2].step(latencies, shares, style, label=label)
    axes[2].set(xlabel="latency (s), Poisson arrivals", ylabel="share of the requests")
    for panel in axes:
        panel.legend()
    figures.save(figure, out_dir, "validate_simulator.png")


def main(config: Config) -> None:
    with closing(prepared(config)) as real:
        requests, notes = build_workload(
            "lengths",
            lengths=config.lengths,
            num_requests=config.num_requests,
            max_model_len=real.engine.max_model_len,
            vocab=VocabRange(0, real.engine.config.vocab_size),
            seed=config.seed,
        )
        for note in notes:
            print(note)
        rounds, measured = run_rounds(real, requests, config)

    pairs = [tuple(curves(runs["at_once"]) for runs in both) for both in rounds]
    differences = [first_difference(*pair) for pair in pairs]
    cases = list(compare(rounds))
    num_preemptions = [real["at_once"].num_preemptions for real, _ in rounds]
    report(
        f"The real engine and the simulator ({config.clock} time)",
        cases,
        config,
        curves_equal=[difference is None for difference in differences],
        num_iterations=len(pairs[0][0]),
        num_preemptions=num_preemptions[0],
        goal_percent=GOAL_PERCENT,
        **measured,
    )
    rows = [
        {"run": run, "iteration": number, **dict(zip(CURVES, row, strict=True))}
        for run, own in zip(("real", "simulated"), pairs[-1], strict=True)
        for number, row in enumerate(own)
    ]
    write_csv(config.out_dir, "curves.csv", rows)
    plot(*rounds[-1], config.out_dir)
    for number, difference in enumerate(differences):
        print(
            f"round {number}, all at once: {len(pairs[number][0])} iterations, "
            f"{num_preemptions[number]} preemptions: "
            f"{difference or 'batches and memory are the same in each'}"
        )
    met = [case["in_goal"] for case in cases if case["in_goal"] is not None]
    print(f"figures with a goal: {sum(met)} within {GOAL_PERCENT} %, {met.count(False)} not")


def claims(results: Results) -> Iterator[Claim]:
    """The simulator is this project's own; the paper has none."""
    for row in [row for row in results["cases"] if row["in_goal"] is not None]:
        yield Claim(
            f"simulator, {row['workload']}: {row['figure']}",
            "-",
            f"{row['simulated']:.3g} simulated, {row['real']:.3g} measured",
            f"within {results['goal_percent']} %",
            row["in_goal"],
            "timings on a machine that does other things, too, differ between two real runs",
        )
    is_same, what = all(results["curves_equal"]), "simulator: batches and memory in each iteration"
    yield Claim(what, "-", "the same" if is_same else "differ", "the same", is_same)


if __name__ == "__main__":
    run(main, Config)
