"""Is the simulator right? The same workloads on the real engine and simulated, side by side.

    python -m experiments.simulator.validate --quick
    python -m experiments.simulator.validate
    python -m experiments.simulator.validate --clock=cpu --lengths=alpaca --num_requests=24

Two workloads of the same requests:

    at_once   all are there at the start, and memory is short: who runs in which iteration is
              decided by lengths alone, so batch sizes, preemptions and every memory slot must be
              the same in each iteration
    poisson   they arrive at --load of what the engine sustains: when is decided by step times too

The simulator's step times are calibrated on this machine, on other workloads
(`python -m experiments.simulator.calibrate` shows that alone), before and after each round, so that a machine
that grows faster or slower does not count. Throughput and latencies are compared in each round;
what is shown is the median over rounds, and the difference is the median of the rounds'.

The machine should have nothing else to do; --clock=cpu counts CPU time instead, in which arrivals
then are too. Expect two minutes with --quick and 20 without on two CPU cores. --out_dir gets
results.json, results.csv, curves.csv and validate_simulator.png.
"""

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags

from experiments.lib import reporting
from experiments.lib.reporting import preset
from experiments.simulator.calibration import facts, measure, prepare
from experiments.simulator.real_engine import CLOCKS, RealEngine
from paged_jax.simulation.calibrated import CalibratedCost, Measured
from paged_jax.simulation.run import SimulatedRun, simulate
from paged_jax.workloads import (
    PUBLISHED_LENGTHS,
    VocabRange,
    WorkloadRequest,
    arrive_poisson,
    build_workload,
)

CURVES = (
    "batch size",
    "prefill tokens",
    "preempted",
    "finished",
    "running",
    "waiting",
    "token states",
    "reserved",
    "internal",
    "free",
)


def curves(run: SimulatedRun) -> list[tuple[int, ...]]:
    """For each iteration the values of `CURVES`."""
    return [
        (
            stats.num_decodes + stats.num_prefill_seqs,
            stats.num_prefill_tokens,
            stats.num_preempted,
            stats.num_finished,
            stats.num_running,
            stats.num_waiting,
            stats.usage.token_states,
            stats.usage.reserved,
            stats.usage.internal,
            stats.usage.free,
        )
        for stats in run.iterations
    ]


def first_difference(real: list[tuple[int, ...]], simulated: list[tuple[int, ...]]) -> str | None:
    """Where two runs part; None if they are the same in every iteration."""
    for number, (one, other) in enumerate(zip(real, simulated, strict=False)):
        for name, measured, predicted in zip(CURVES, one, other, strict=True):
            if measured != predicted:
                return f"iteration {number}: {name} {measured}, simulated {predicted}"
    if len(real) != len(simulated):
        return f"{len(real)} iterations, simulated {len(simulated)}"
    return None


_QUICK = flags.DEFINE_bool("quick", False, "Alpaca's lengths, few requests, one round.")
_ROUNDS = flags.DEFINE_integer(
    "rounds", None, "How often all is measured; default: 3, or 1 with --quick.", lower_bound=1
)
_NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests", None, "Requests; default: 40, or 24 with --quick.", lower_bound=2
)
_LENGTHS = flags.DEFINE_enum(
    "lengths",
    None,
    list(PUBLISHED_LENGTHS),
    "Whose lengths requests have; default: sharegpt, or alpaca with --quick.",
)
_LOAD = flags.DEFINE_float(
    "load",
    0.7,
    "Request rate of the Poisson arrivals, as a share of what the engine made of all at once.",
    lower_bound=0.01,
)
_MODEL = flags.DEFINE_string("model", "smollm2", "The model's name or path.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Slots (tokens) of a KV block.", lower_bound=1)
_NUM_BLOCKS = flags.DEFINE_integer(
    "num_blocks",
    None,
    "Blocks of the pool; default: 300, or 40 with --quick: too few for all who may run.",
    lower_bound=1,
)
_MAX_NUM_SEQS = flags.DEFINE_integer(
    "max_num_seqs", None, "Sequences at a time; default: 16, or 8 with --quick.", lower_bound=1
)
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", None, "Tokens of an iteration; default: 256 on a CPU, 4096 on a GPU."
)
_MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len",
    None,
    "Longest prompt and output; longer requests are left out; default: 1024, or 512 with --quick.",
)
_CLOCK = flags.DEFINE_enum(
    "clock", "wall", list(CLOCKS), "Wall time, or CPU time of all threads, on a busy machine."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths, prompts and arrivals.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/validate_simulator", "Where the results go.")

GOAL_PERCENT = 10


class Case(NamedTuple):
    """A figure of a workload; `in_goal` says nothing of those for which no goal is set."""

    workload: str
    figure: str
    real: float
    simulated: float
    difference_percent: float
    in_goal: bool | None


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


# (name, how it is computed, whether it has to be within the goal)
FIGURES: tuple[tuple[str, Callable[[SimulatedRun], float], bool], ...] = (
    ("output tokens/s", lambda run: run.output_tokens_per_s, True),
    ("latency p50 (s)", lambda run: _percentile(run.latencies_s, 50), True),
    ("latency p99 (s)", lambda run: _percentile(run.latencies_s, 99), True),
    (
        "normalised latency p50 (ms)",
        lambda run: 1e3 * _percentile(run.normalised_latencies_s, 50),
        True,
    ),
    (
        "normalised latency p99 (ms)",
        lambda run: 1e3 * _percentile(run.normalised_latencies_s, 99),
        True,
    ),
    ("time to first token p50 (s)", lambda run: _percentile(run.ttfts_s, 50), False),
    ("time to first token p99 (s)", lambda run: _percentile(run.ttfts_s, 99), False),
    ("mean batch size, over time", lambda run: run.mean_batch_size, False),
    ("token states (% of the pool)", lambda run: 100 * run.memory_shares["token_states"], False),
)


class Round(NamedTuple):
    """The runs of each workload."""

    real: dict[str, SimulatedRun]
    simulated: dict[str, SimulatedRun]


def run_rounds(
    real: RealEngine, requests: list[WorkloadRequest], num_rounds: int
) -> tuple[list[Round], dict[str, Any]]:
    """Calibrations and rounds in turn; and facts on what was measured."""
    calibrations = [measure(real, _SEED.value)]
    rate = _LOAD.value * _rate_at_once(real, requests, calibrations[0])
    workloads = {
        "at_once": requests,
        "poisson": arrive_poisson(requests, rate=rate, seed=_SEED.value),
    }
    rounds: list[Round] = []
    for number in range(num_rounds):
        real_runs = {name: real.serve(each, name)[0] for name, each in workloads.items()}
        calibrations.append(measure(real, _SEED.value + number + 1))
        cost = CalibratedCost.fit(calibrations[-2] + calibrations[-1], real.buckets)
        simulated = {name: simulate(each, real.system, cost) for name, each in workloads.items()}
        rounds.append(Round(real_runs, simulated))
    measured = [each for calibration in calibrations for each in calibration]
    residuals = CalibratedCost.fit(measured, real.buckets).residuals(measured)
    return rounds, {"rate": rate, "calibration": facts(measured), "residuals": residuals}


def _rate_at_once(
    real: RealEngine, requests: list[WorkloadRequest], measured: list[Measured]
) -> float:
    """Requests per second that the engine makes of all at once, as it is simulated."""
    cost = CalibratedCost.fit(measured, real.buckets)
    return simulate(requests, real.system, cost).requests_per_s


def compare(rounds: list[Round]) -> list[Case]:
    cases = []
    for workload in rounds[0].real:
        for name, figure, has_goal in FIGURES:
            pairs = [(figure(r.real[workload]), figure(r.simulated[workload])) for r in rounds]
            difference = statistics.median(
                100 * (simulated / measured - 1) for measured, simulated in pairs
            )
            cases.append(
                Case(
                    workload,
                    name,
                    statistics.median(measured for measured, _ in pairs),
                    statistics.median(simulated for _, simulated in pairs),
                    difference,
                    abs(difference) <= GOAL_PERCENT if has_goal else None,
                )
            )
    return cases


def plot(last: Round, path: str) -> None:
    """Batch size and memory over iterations; latencies of the requests that arrived in turn."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for label, style, runs in (("real", "-", last.real), ("simulated", "--", last.simulated)):
        found = curves(runs["at_once"])
        for at, name in zip(axes, ("batch size", "token states"), strict=False):
            at.plot([row[CURVES.index(name)] for row in found], style, label=label)
            at.set_xlabel("iteration, all at once")
            at.set_ylabel(name)
        latencies = np.sort(runs["poisson"].latencies_s)
        axes[2].step(
            latencies, np.arange(1, 1 + len(latencies)) / len(latencies), style, label=label
        )
    axes[2].set_xlabel("latency (s), Poisson arrivals")
    axes[2].set_ylabel("share of the requests")
    for at in axes:
        at.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    is_quick = _QUICK.value
    real = RealEngine(
        _MODEL.value,
        CLOCKS[_CLOCK.value](),
        seed=_SEED.value,
        block_size=_BLOCK_SIZE.value,
        num_blocks=preset(_NUM_BLOCKS, is_quick, quick=40, full=300),
        max_num_seqs=preset(_MAX_NUM_SEQS, is_quick, quick=8, full=16),
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS.value,
        max_model_len=preset(_MAX_MODEL_LEN, is_quick, quick=512, full=1024),
    )
    try:
        prepare(real, _SEED.value)
        requests, notes = build_workload(
            "lengths",
            lengths=preset(_LENGTHS, is_quick, quick="alpaca", full="sharegpt"),
            num_requests=preset(_NUM_REQUESTS, is_quick, quick=24, full=40),
            max_model_len=real.engine.max_model_len,
            vocab=VocabRange(0, real.engine.config.vocab_size),
            seed=_SEED.value,
        )
        for note in notes:
            print(note)
        rounds, measured = run_rounds(real, requests, preset(_ROUNDS, is_quick, quick=1, full=3))
    finally:
        real.close()

    pairs = [(curves(r.real["at_once"]), curves(r.simulated["at_once"])) for r in rounds]
    differences = [first_difference(*pair) for pair in pairs]
    cases = compare(rounds)
    reporting.report_cases(
        f"The real engine and the simulator ({_CLOCK.value} time)",
        [case._asdict() for case in cases],
        out_dir,
        _QUICK,
        curves_equal=[difference is None for difference in differences],
        num_iterations=len(pairs[0][0]),
        num_preemptions=rounds[0].real["at_once"].num_preemptions,
        goal_percent=GOAL_PERCENT,
        **measured,
    )
    reporting.write_csv(
        out_dir,
        "curves.csv",
        [
            {"run": run, "iteration": number, **dict(zip(CURVES, row, strict=True))}
            for run, rows in zip(("real", "simulated"), pairs[-1], strict=True)
            for number, row in enumerate(rows)
        ],
    )
    plot(rounds[-1], str(out_dir / "validate_simulator.png"))
    for number, difference in enumerate(differences):
        preemptions = rounds[number].real["at_once"].num_preemptions
        print(
            f"round {number}, all at once: {len(pairs[number][0])} iterations, {preemptions} "
            f"preemptions: {difference or 'batches and memory are the same in each'}"
        )
    missed = [case for case in cases if case.in_goal is False]
    print(
        f"figures with a goal: {sum(case.in_goal is True for case in cases)} within "
        f"{GOAL_PERCENT} %, {len(missed)} not"
    )
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
