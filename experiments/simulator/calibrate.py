"""Fits the simulator's step times to a real engine on this machine.

    python -m experiments.simulator.calibrate --quick
    python -m experiments.simulator.calibrate
    python -m experiments.simulator.calibrate --model=path/to/model --max_num_seqs=32

An engine serves workloads of random lengths in which steps of every size occur. What its
iterations took is fitted by least squares: a time for each size that steps are filled up to, and
times in proportion for contexts, attention in prompts, copies and the host's work
(`paged_jax/simulation/calibrated.py`). The rounds are fitted together; residuals are also given
for each round as predicted by the others, which tells fit from noise.

The machine should have nothing else to do; --clock=cpu counts CPU time, which other work disturbs
less. Expect half a minute with --quick and a few minutes
without on two CPU cores, and the compilation of all steps before that on the first run. --out_dir
gets calibration.json, which `CalibratedCost.load` reads, results.json, results.csv and
calibrate.png.
"""

from dataclasses import asdict

import matplotlib.pyplot as plt
import numpy as np
from absl import flags

from experiments.lib import reporting
from experiments.lib.reporting import preset
from experiments.simulator.calibration import facts, measure, prepare
from experiments.simulator.real_engine import CLOCKS, RealEngine
from paged_jax.simulation.calibrated import CalibratedCost, Measured

_QUICK = flags.DEFINE_bool("quick", False, "Two rounds, up to 8 sequences at a time.")
_ROUNDS = flags.DEFINE_integer(
    "rounds", None, "How often each size is measured; default: 4, or 2 with --quick.", lower_bound=2
)
_MODEL = flags.DEFINE_string("model", "smollm2", "The model's name or path.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Slots (tokens) of a KV block.", lower_bound=1)
_NUM_BLOCKS = flags.DEFINE_integer(
    "num_blocks", None, "Blocks of the pool; default: for all sequences at their longest."
)
_MAX_NUM_SEQS = flags.DEFINE_integer(
    "max_num_seqs", None, "Sequences at a time; default: 16, or 8 with --quick.", lower_bound=1
)
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", None, "Tokens of an iteration; default: 256 on a CPU, 4096 on a GPU."
)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 1024, "Longest prompt and output together.")
_CLOCK = flags.DEFINE_enum(
    "clock", "wall", list(CLOCKS), "Wall time, or CPU time of all threads, on a busy machine."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths and prompts.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/calibrate", "Where the results go.")


def held_out(rounds: list[list[Measured]], real: RealEngine) -> list[float]:
    """For each round the median absolute error of what the other rounds predict, in percent."""
    errors = []
    for left_out, measured in enumerate(rounds):
        others = [each for i, r in enumerate(rounds) if i != left_out for each in r]
        cost = CalibratedCost.fit(others, real.buckets)
        errors.append(100 * cost.residuals(measured).median_absolute)
    return errors


def plot(cost: CalibratedCost, measured: list[Measured], path: str) -> None:
    """Predicted against measured, a point an iteration."""
    times = 1e3 * np.array([seconds for _, seconds in measured])
    predicted = 1e3 * np.array([cost.step_s(work) for work, _ in measured])
    has_prefill = np.array([bool(work.prefills) for work, _ in measured])
    figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
    for label, chosen in (("decoding only", ~has_prefill), ("with a prefill", has_prefill)):
        axes.loglog(times[chosen], predicted[chosen], ".", alpha=0.5, label=label)
    ends = [min(times.min(), predicted.min()), max(times.max(), predicted.max())]
    axes.loglog(ends, ends, "k-", linewidth=0.8)
    axes.set_xlabel("measured (ms)")
    axes.set_ylabel("predicted (ms)")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    real = RealEngine(
        _MODEL.value,
        CLOCKS[_CLOCK.value](),
        seed=_SEED.value,
        block_size=_BLOCK_SIZE.value,
        num_blocks=_NUM_BLOCKS.value,
        max_num_seqs=preset(_MAX_NUM_SEQS, _QUICK.value, quick=8, full=16),
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS.value,
        max_model_len=_MAX_MODEL_LEN.value,
    )
    try:
        prepare(real, _SEED.value)
        num_rounds = preset(_ROUNDS, _QUICK.value, quick=2, full=4)
        rounds = [measure(real, _SEED.value + number) for number in range(num_rounds)]
    finally:
        real.close()
    measured = [each for one_round in rounds for each in one_round]
    cost = CalibratedCost.fit(measured, real.buckets)
    residuals = cost.residuals(measured)
    environment = reporting.environment()
    cost.save(
        out_dir / "calibration.json",
        model=real.engine.config.name,
        clock=_CLOCK.value,
        measured=facts(measured),
        residuals=asdict(residuals),
        environment=environment,
    )
    counts: dict[str, int] = {}
    for work, _ in measured:
        for name in cost.buckets.features(work):
            counts[name] = counts.get(name, 0) + 1
    cases = [
        {"term": name, "iterations": counts[name], "ms": 1e3 * seconds}
        for name, seconds in sorted(cost.seconds.items(), key=lambda item: _order(item[0]))
    ]
    errors = held_out(rounds, real)
    reporting.report_cases(
        "Time of an iteration: the sum of",
        cases,
        out_dir,
        _QUICK,
        measured=facts(measured),
        residuals=residuals,
        held_out_median_percent=errors,
    )
    print(
        f"{residuals.num_iterations} iterations: predictions are off by "
        f"{100 * residuals.median_absolute:.1f} % in the median, "
        f"{100 * residuals.p90_absolute:.1f} % at p90; their sum by "
        f"{100 * residuals.total_relative:+.1f} %. Rounds predicted by the others, medians: "
        f"{', '.join(f'{error:.1f}' for error in errors)} %."
    )
    plot(cost, measured, str(out_dir / "calibrate.png"))
    print(f"results in {out_dir}")


def _order(term: str) -> tuple[str, int]:
    """Steps of a kind by size."""
    kind, _, size = term.rpartition(" ")
    return (kind, int(size)) if size.isdigit() else (term, 0)


if __name__ == "__main__":
    reporting.run(main)
