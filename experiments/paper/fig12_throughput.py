"""How many requests per second each system sustains: latency against request rate (Figure 12).

    python -m experiments.paper.fig12_throughput --quick
    python -m experiments.paper.fig12_throughput
    python -m experiments.paper.fig12_throughput --lengths=sharegpt_trace --objective_s=0.5

Simulated: the engine's own scheduler and memory managers, with step times of a roofline model of
the paper's GPUs. Five systems serve the same Poisson arrivals of the same requests, to their end:
FasterTransformer (batches that are formed when nothing runs), Orca with its three ways to reserve
contiguous memory, and paging. They differ in memory and batching alone, and contiguous attention
kernels pay nothing for blocks.

A system sustains the highest rate at which the mean over requests of the time from arrival to the
last token, per output token, stays within --objective_s, found by bisection to 2 % (--quick: 4 %).
The paper names no objective; ratios hardly depend on it, as latencies soar where a system falls
behind. Its traces last an hour; in shorter ones, which start with an empty pool, all systems
sustain somewhat more, and paging somewhat less over the others (`gain`).

Expect two minutes with --quick, which has OPT-13B alone, and half an hour without on two cores.
curves.csv has every run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.lib import option, report, run
from experiments.lib.claims import Claim, Results, Rows, at_least, chosen, claim, figure, in_order
from experiments.paper.requests import LENGTHS, draw, note_on_length
from experiments.paper.setups import MAX_NUM_SEQS, SETUPS, SYSTEMS
from experiments.paper.simulations import SearchOptions, Sustained, find_panels, save_curves


@dataclass(frozen=True, kw_only=True)
class Config(SearchOptions):
    models: tuple[str, ...] = option(tuple(SETUPS), "Models.", quick=("OPT-13B",), choices=SETUPS)
    lengths: tuple[str, ...] = option(
        ("sharegpt_served", "alpaca"), "Requests have lengths of these kinds.", choices=LENGTHS
    )
    systems: tuple[str, ...] = option(tuple(SYSTEMS), "Systems to compare.", choices=SYSTEMS)
    duration_s: float = option(
        1200.0, "Requests arrive for so long (s), short ones for less.", quick=500.0, least=1
    )


FRACTIONS = (0.3, 0.6, 0.8, 0.9)  # of the sustained rate, run for the curves
PAPER_GAIN = {
    "faster_transformer": "up to 22",
    "orca_max": "2.7 to 8",
    "orca_oracle": "1.7 to 2.7",
}  # on ShareGPT (section 6.2)


def mean_output(lengths: str, seed: int) -> float:
    """In tokens: a trace has to last for so many requests' lifetimes."""
    return float(np.mean([r.max_tokens for r in draw(lengths, 1000, 2048, seed)]))


def row_of(found: Sustained) -> dict[str, Any]:
    """What one system sustains, in requests/s; latencies in ms per output token."""
    system, lengths, at = found.load.system, found.load.lengths, found.point
    unloaded_s = found.points[0].normalised_latency_s if found.points else None
    return {
        "model": found.load.deployment.model.name,
        "lengths": lengths,
        "system": system,
        "rate": found.rate,  # None: the objective is not met at any rate
        "gain": found.gain,  # of paging over it
        "paper": PAPER_GAIN.get(system) if lengths.startswith("sharegpt") else None,
        "batch_size": at and at.mean_batch_size,  # at that rate
        "tokens_percent": at and 100 * at.token_states,  # in the pool, at that rate
        "unloaded_ms": unloaded_s and 1e3 * unloaded_s,  # at the lowest rate that was run
    }


def main(config: Config) -> None:
    setups = [SETUPS[model] for model in config.models]
    for name in config.lengths:
        print(note_on_length(name, setups[0].model.max_model_len, config.seed))
    longest = mean_output("sharegpt", config.seed)
    loads = {
        (setup.model.name, lengths): config.loads_of(setup, lengths, duration_s)
        for lengths in config.lengths
        for duration_s in [config.duration_s * (mean_output(lengths, config.seed) / longest)]
        for setup in setups
    }
    fractions, precision = (FRACTIONS[1::2], 0.04) if config.quick else (FRACTIONS, 0.02)
    panels = find_panels(loads, config, precision=precision, fractions=fractions)
    report(
        f"Sustained within {config.objective_s:g} s per output token",
        [row_of(found) for compared in panels.values() for found in compared],
        config,
        duration_s=config.duration_s,
        slots={setup.model.name: setup.num_slots for setup in setups},
    )
    names = "model", "lengths"
    save_curves(panels, config.out_dir, "throughput.png", names=names, columns=len(setups))


# The paper's claims


def claims(results: Results) -> Iterator[Claim]:
    """Each model's gains and the order of the systems, then what a larger model gains."""
    for model in dict.fromkeys(row["model"] for row in results["cases"]):
        rows = chosen(results["cases"], model=model)
        yield from gain_claims(model, chosen(rows, lengths="sharegpt"))
        for lengths in ("sharegpt", "alpaca"):
            yield from order_claims(f"{model}, {lengths}", chosen(rows, lengths=lengths))
    on_alpaca = chosen(results["cases"], lengths="alpaca", system="orca_oracle")
    oracle = {row["model"]: row["gain"] for row in on_alpaca}
    if {"OPT-13B", "OPT-175B"} <= oracle.keys():
        small, large = oracle["OPT-13B"], oracle["OPT-175B"]
        yield claim(
            "Alpaca: paging gains less on OPT-175B, which is bound by arithmetic",
            paper="less",
            found=(large, small),
            ours=f"{figure(large)} after {figure(small)} on OPT-13B",
            rule=in_order("a smaller gain over Oracle"),
        )


def gain_claims(model: str, rows: Rows) -> Iterator[Claim]:
    """Gains over Orca and over FasterTransformer; `rows` are of ShareGPT's lengths."""
    for row in (*chosen(rows, system="orca_oracle"), *chosen(rows, system="orca_max")):
        paper = PAPER_GAIN[row["system"]]
        yield claim(
            f"{model}, ShareGPT: request rate of paging over {SYSTEMS[row['system']].label}",
            paper=paper,
            found=row["gain"],
            rule=at_least(float(paper.split()[0])),
            note="both are bound by the pool here, so the gain is that of the batch sizes, less "
            "what a larger batch adds to a step; traces shorter than the paper's hour start with "
            "an empty pool, which paging takes longer to fill",
        )
    most = int(PAPER_GAIN["faster_transformer"].split()[-1])
    for row in chosen(rows, system="faster_transformer"):
        for orca in chosen(rows, system="orca_max", lengths=row["lengths"]):
            yield Claim(
                f"{model}, ShareGPT: paging over FasterTransformer",
                PAPER_GAIN["faster_transformer"],
                figure(row["gain"]),
                f"more than over Orca (Max), and not above {most}",
                row["gain"] is not None and (orca["gain"] or 0.0) < row["gain"] <= most,
                f"one of the paper's set-ups comes to {most}; a static batch here is formed of "
                "what waits when the last one has ended",
            )


def order_claims(what: str, rows: Rows) -> Iterator[Claim]:
    """The order of the systems' rates, where all systems ran."""
    if len(rows) >= len(SYSTEMS):
        rates = [row["rate"] for name in SYSTEMS for row in rows if row["system"] == name]
        sizes = ", ".join(f"{row['system']} {figure(row['batch_size'])}" for row in rows)
        yield claim(
            f"{what}: order of the systems' rates",
            paper="FasterTransformer < Max < Pow2 < Oracle < vLLM",
            found=rates,
            ours=" < ".join(map(figure, rates)),
            rule=in_order(),
            note=f"batch sizes at these rates: {sizes}; at most {MAX_NUM_SEQS} sequences run",
        )


if __name__ == "__main__":
    run(main, Config)
