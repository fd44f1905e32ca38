"""How many requests per second each system sustains: latency against request rate (Figure 12).

    python -m experiments.paper.fig12_throughput --quick
    python -m experiments.paper.fig12_throughput
    python -m experiments.paper.fig12_throughput --lengths=sharegpt_trace --objective_s=0.5

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

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.lib import figures
from experiments.lib.experiment import grid, run
from experiments.lib.options import SimulationOptions, option
from experiments.lib.reporting import report, write_csv
from experiments.paper.requests import LENGTHS, draw, note_on_length
from experiments.paper.setups import SETUPS, find_setup
from experiments.paper.simulations import (
    Load,
    Sustained,
    curve_points,
    find_sustained,
    plot_panel,
)
from experiments.paper.systems import SYSTEMS


@dataclass(frozen=True, kw_only=True)
class Config(SimulationOptions):
    models: tuple[str, ...] = option(
        tuple(SETUPS), "These models are served.", quick=("OPT-13B",), choices=SETUPS
    )
    lengths: tuple[str, ...] = option(
        ("sharegpt_served", "alpaca"), "Requests have lengths of these kinds.", choices=LENGTHS
    )
    systems: tuple[str, ...] = option(
        tuple(SYSTEMS), "These systems are compared.", choices=SYSTEMS
    )
    duration_s: float = option(
        1200.0,
        "Requests of ShareGPT's lengths arrive for so long (s), shorter requests for less.",
        quick=500.0,
        least=1,
    )
    objective_s: float = option(
        0.1,
        "A rate is sustained if the mean latency per output token is at most this (s).",
        least=1e-3,
    )


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


def relative_length(lengths: str, seed: int) -> float:
    """Mean output tokens, of ShareGPT's: a trace has to last for so many requests' lifetimes."""

    def mean_output(name: str) -> float:
        return float(np.mean([r.max_tokens for r in draw(name, 1000, 2048, seed)]))

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


def plot(found: list[Sustained], out_dir: str) -> None:
    """A panel for each model and dataset, a line for each system, as Figure 12."""
    chosen: dict[tuple[str, str], list[Sustained]] = {}
    for result in found:
        chosen.setdefault(panel_of(result.load), []).append(result)
    models = list(dict.fromkeys(model for model, _ in chosen))
    lengths = list(dict.fromkeys(name for _, name in chosen))
    figure, axes = figures.panels(len(lengths), len(models))
    for (model, name), results in chosen.items():
        panel = axes[lengths.index(name), models.index(model)]
        plot_panel(panel, results)
        panel.set_title(f"{model}, {name}", fontsize=10)
    for panel in axes[:, 0]:
        panel.set_ylabel("normalised latency (s/token)")
    axes[0, 0].legend(fontsize=8)
    figures.save(figure, out_dir, "throughput.png")


def main(config: Config) -> None:
    setups = [find_setup(model) for model in config.models]
    for name in config.lengths:
        print(note_on_length(name, setups[0].model.max_model_len, config.seed))
    loads = [
        Load(
            system,
            setup.deployment,
            lengths,
            config.duration_s * relative_length(lengths, config.seed),
            seed=config.seed,
        )
        for lengths in config.lengths
        for setup in setups
        for system in SYSTEMS
        if system in config.systems
    ]
    search = partial(
        find_sustained,
        objective_s=config.objective_s,
        precision=0.04 if config.quick else 0.02,
        fractions=FRACTIONS[1::2] if config.quick else FRACTIONS,
    )
    # Short requests are many, and paging serves the most.
    order = sorted(loads, key=lambda load: (load.lengths != "alpaca", load.system != "paged"))
    rows = grid(search, order, config, unit="system", processes=config.processes)
    done = {found.load: found for found in rows}
    found = [done[load] for load in loads]
    paged = {panel_of(f.load): f.rate for f in found if f.load.system == "paged"}
    report(
        f"Sustained within {config.objective_s:g} s per output token",
        [case_of(f, paged.get(panel_of(f.load))) for f in found],
        config,
        duration_s=config.duration_s,
        slots={setup.model_name: setup.num_slots for setup in setups},
    )
    curve = [
        dict(zip(("model", "lengths"), panel_of(f.load), strict=True)) | point._asdict()
        for f in found
        for point in curve_points(f)
    ]
    write_csv(config.out_dir, "curves.csv", curve)
    plot(found, config.out_dir)


if __name__ == "__main__":
    run(main, Config)
