"""How many requests per second each system sustains: latency against request rate (Figure 12).

    python -m experiments.paper.fig12_throughput --quick
    python -m experiments.paper.fig12_throughput
    python -m experiments.paper.fig12_throughput --models=OPT-13B --lengths=sharegpt_trace --objective_s=0.5

Simulated: the engine's own scheduler and memory managers, with step times of a roofline model of
the paper's GPUs. Five systems serve the same Poisson arrivals of the same requests:
FasterTransformer (batches that are formed when nothing runs), Orca with its three ways to reserve
contiguous memory, and paging. They differ in memory and batching; the scheduler, the chunked
prefill and the model of step times are the same, but that contiguous attention kernels pay nothing
for blocks.

Latencies are normalised as in the paper: the mean over requests of the time from arrival to the
last token, divided by the number of output tokens. All requests that arrive in time are served to
their end. A system sustains the highest rate at which that mean stays within --objective_s, found
by bisection to 2 % (--quick: 4 %). The paper names no objective; ratios hardly depend on it, as
latencies soar where a system falls behind. Its traces last an hour; in shorter ones, which start
with an empty pool, all systems sustain somewhat more, and paging somewhat less over the others.

`gain` is the rate that paging sustains over the system's. Expect two minutes with --quick, which
has OPT-13B alone, and half an hour without on two cores. --out_dir gets results.json,
results.csv, curves.csv and throughput.png.
"""

from functools import partial
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags

from experiments.lib import reporting
from experiments.lib.parallel import run_all
from experiments.lib.reporting import preset
from experiments.paper.requests import LENGTHS, check_lengths, draw, note_on_length
from experiments.paper.setups import SETUPS, find_setup
from experiments.paper.simulations import Load, Sustained, curve_points, find_sustained, plot_panel
from experiments.paper.systems import SYSTEMS, chosen_systems

_QUICK = flags.DEFINE_bool("quick", False, "OPT-13B alone, short traces.")
_MODELS = flags.DEFINE_list(
    "models", None, f"Of {', '.join(SETUPS)}; default: all, or OPT-13B with --quick."
)
_LENGTHS = flags.DEFINE_list(
    "lengths", ["sharegpt_served", "alpaca"], f"Whose lengths requests have: {', '.join(LENGTHS)}."
)
_SYSTEMS = flags.DEFINE_list("systems", list(SYSTEMS), "What is compared.")
_DURATION_S = flags.DEFINE_float(
    "duration_s",
    None,
    "How long requests of ShareGPT's lengths arrive; shorter ones that much shorter. Default: "
    "1200, or 500 with --quick.",
    lower_bound=1,
)  # fmt: skip
_OBJECTIVE_S = flags.DEFINE_float(
    "objective_s", 0.1, "Mean latency per output token that counts as sustained.", lower_bound=1e-3
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths and arrivals.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/throughput", "Where the results go.")

FRACTIONS = (0.3, 0.6, 0.8, 0.9)  # of the sustained rate, run for the curves
PAPER_GAIN = {
    "faster_transformer": "up to 22",
    "orca_max": "2.7 to 8",
    "orca_oracle": "1.7 to 2.7",
}  # on ShareGPT (section 6.2)


class Case(NamedTuple):
    """What one system sustains, in requests/s; latencies in ms per output token."""

    model: str
    lengths: str
    system: str
    rate: float | None  # None: the objective is not met at any rate
    gain: float | None  # of paging over it
    paper: str | None  # gain
    batch_size: float | None  # mean, at that rate
    tokens_percent: float | None  # token states in the pool, at that rate
    unloaded_ms: float | None  # at the lowest rate that was run


def relative_length(lengths: str) -> float:
    """Mean output tokens, of ShareGPT's: a trace has to last for so many requests' lifetimes."""

    def mean_output(name: str) -> float:
        return float(np.mean([r.max_tokens for r in draw(name, 1000, 2048, _SEED.value)]))

    return mean_output(lengths) / mean_output("sharegpt")


def panel_of(load: Load) -> tuple[str, str]:
    """The model and the lengths that systems are compared on."""
    return load.deployment.model.name, load.lengths


def case_of(found: Sustained, paged_rate: float | None) -> Case:
    load = found.load
    at = next((point for point in found.points if point.rate == found.rate), None)
    gain = paged_rate / found.rate if paged_rate and found.rate else None
    unloaded_s = found.points[0].normalised_latency_s if found.points else None
    return Case(
        *panel_of(load),
        load.system,
        found.rate,
        gain,
        PAPER_GAIN.get(load.system) if load.lengths.startswith("sharegpt") else None,
        None if at is None else at.mean_batch_size,
        None if at is None else 100 * at.token_states,
        None if unloaded_s is None else 1e3 * unloaded_s,
    )


def plot(found: list[Sustained], path: str) -> None:
    """A panel for each model and dataset, a line for each system, as Figure 12."""
    panels = list(dict.fromkeys(panel_of(result.load) for result in found))
    models = list(dict.fromkeys(model for model, _ in panels))
    lengths = list(dict.fromkeys(name for _, name in panels))
    figure, all_axes = plt.subplots(
        len(lengths), len(models), figsize=(4.5 * len(models), 3.2 * len(lengths)),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for row, name in enumerate(lengths):
        for column, model in enumerate(models):
            chosen = [
                r for r in found if (r.load.deployment.model.name, r.load.lengths) == (model, name)
            ]
            plot_panel(all_axes[row][column], chosen)
            all_axes[row][column].set_title(f"{model}, {name}", fontsize=10)
    for row_axes in all_axes:
        row_axes[0].set_ylabel("normalised latency (s/token)")
    all_axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    is_quick = _QUICK.value
    models = _MODELS.value or (["OPT-13B"] if is_quick else list(SETUPS))
    setups = [find_setup(model) for model in models]
    check_lengths(_LENGTHS.value)
    systems = chosen_systems(_SYSTEMS.value)
    duration_s = preset(_DURATION_S, is_quick, quick=500.0, full=1200.0)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)

    for name in _LENGTHS.value:
        print(note_on_length(name, setups[0].model.max_model_len, _SEED.value))
    loads = [
        Load(
            system.name,
            setup.deployment,
            lengths,
            duration_s * relative_length(lengths),
            seed=_SEED.value,
        )
        for lengths in _LENGTHS.value
        for setup in setups
        for system in systems
    ]
    # Short requests are many, and paging serves the most.
    order = sorted(loads, key=lambda load: (load.lengths != "alpaca", load.system != "paged"))
    search = partial(
        find_sustained,
        objective_s=_OBJECTIVE_S.value,
        precision=0.04 if is_quick else 0.02,
        fractions=FRACTIONS[1::2] if is_quick else FRACTIONS,
    )
    done = {
        found.load: found
        for found in run_all(search, order, description="sustained rates", unit="system")
    }
    found = [done[load] for load in loads]
    paged = {
        (f.load.deployment.model.name, f.load.lengths): f.rate
        for f in found
        if f.load.system == "paged"
    }
    cases = [case_of(f, paged.get((f.load.deployment.model.name, f.load.lengths))) for f in found]
    reporting.report_cases(
        f"Sustained within {_OBJECTIVE_S.value:g} s per output token",
        [case._asdict() for case in cases],
        out_dir,
        _QUICK,
        duration_s=duration_s,
        slots={setup.model_name: setup.num_slots for setup in setups},
    )
    curve = [
        dict(zip(("model", "lengths"), panel_of(f.load), strict=True)) | point._asdict()
        for f in found
        for point in curve_points(f)
    ]
    reporting.write_csv(out_dir, "curves.csv", curve)
    plot(found, str(out_dir / "throughput.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
