"""What uniform lengths hide: the same mean lengths, other waste and another tail.

    python -m experiments.costs.length_shapes --quick
    python -m experiments.costs.length_shapes
    python -m experiments.costs.length_shapes --systems=paged --rates=paged:2

Benchmarks often give all requests the same length, or lengths drawn evenly from a range. Here
OPT-13B on an A100-40GB (simulated) serves requests whose prompts and outputs have the means of the
paper's ShareGPT workload in any case, and are

    constant    all of these lengths
    uniform     drawn evenly from 1 to twice the mean
    lognormal   as served in the paper (`sharegpt_served`): many short, few very long

Waste is that of `experiments.paper.fig02_memory_waste`, with more requests than the system can
serve. Tails are those of the time to first token at a rate that it sustains. Where all requests
take equally long, none holds up many others.

Expect a minute with --quick, and 5 minutes without on two CPU cores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.lib import figures, grid, option, report, run
from experiments.lib.claims import Claim, Results, Rows, chosen
from experiments.paper.setups import OPT_13B, SYSTEMS, chosen_systems
from experiments.paper.simulations import Load, SystemOptions, parse_rate
from experiments.paper.waste import CATEGORIES, plot_shares, waste_of


@dataclass(frozen=True, kw_only=True)
class Config(SystemOptions):
    rates: tuple[str, ...] = option(
        ("orca_max:0.6", "orca_pow2:0.8", "orca_oracle:1.0", "paged:1.8"),
        "Rates of the tails (system:requests/s). By default about 80 % of the sustained ones.",
    )
    duration_s: float = option(3600.0, "Requests arrive for so long (s).", quick=600.0, least=1)


OVERLOAD = 4.0  # requests/s, more than any of the systems can serve
SHAPES = {"constant": "constant", "uniform": "uniform", "lognormal": "sharegpt_served"}
COLUMNS = (  # of the table
    *("shape", "system", "token_states", "internal", "external"),
    *("batch_size", "rate", "ttft_p50_s", "ttft_p99_s"),
)


def measure(point: tuple[str, Load, float]) -> dict[str, Any]:
    """Shares in percent of the pool, under overload; times at the rate."""
    shape, load, rate = point
    waste = waste_of(load.simulate(OVERLOAD, cut=True).iterations)
    run = load.simulate(rate)
    p50, p99 = np.percentile(run.ttfts_s, [50, 99]).tolist()
    return {
        "shape": shape,
        "system": load.system,
        "mean_prompt_tokens": float(np.mean([r.num_prompt_tokens for r in run.requests])),
        "mean_output_tokens": float(np.mean([r.max_tokens for r in run.requests])),
        **waste.shares,
        "batch_size": waste.batch_size,  # under overload
        "rate": rate,  # requests/s
        "ttft_p50_s": p50,
        "ttft_p99_s": p99,
        "normalised_latency_s": run.normalised_latency_s,  # mean
        "num_preemptions": run.num_preemptions,
    }


def rates_of(texts: tuple[str, ...], systems: list[str]) -> dict[str, float]:
    """Requests/s by system; ValueError unless each of `systems` has a rate that can be."""
    rates = dict(parse_rate("rates", "system:rate, as in paged:1.8", text) for text in texts)
    if wrong := [f"'{name}:{rate:g}'" for name, rate in rates.items() if not 0 < rate < OVERLOAD]:
        raise ValueError(f"--rates must lie above 0 and below {OVERLOAD:g}, got {wrong[0]}")
    if missing := [name for name in systems if name not in rates]:
        raise ValueError(f"--rates has no rate for {', '.join(missing)}")
    return rates


def compare(rows: Rows) -> list[str]:
    """A line for each system: its waste and its tail with each shape of lengths."""
    lines = []
    for system in dict.fromkeys(row["system"] for row in rows):
        shapes = chosen(rows, system=system)
        wasted = " / ".join(f"{row['internal'] + row['external']:.1f}" for row in shapes)
        waits = " / ".join(f"{row['ttft_p99_s']:.3g}" for row in shapes)
        lines.append(
            f"{SYSTEMS[system].label}: fragmentation {wasted} % of the pool, p99 time to first "
            f"token {waits} s at {shapes[0]['rate']:g} requests/s ({' / '.join(SHAPES)})"
        )
    return lines


def plot(rows: Rows, out_dir: str) -> None:
    """Shares on the left, tails on the right."""
    rates = {row["system"]: row["rate"] for row in rows}
    figure, [[left, right]] = figures.panels(1, 2, size=(6.5, 4.5))
    shares: dict[str, dict[str, list[float]]] = {SYSTEMS[name].label: {} for name in rates}
    for row in rows:
        shares[SYSTEMS[row["system"]].label][row["shape"]] = [row[name] for name in CATEGORIES]
    plot_shares(left, shares)
    left.set_ylabel("KV slots under overload (%)")
    labels = [f"{SYSTEMS[name].label}\n{rate:g} requests/s" for name, rate in rates.items()]
    tails = {shape: [row["ttft_p99_s"] for row in chosen(rows, shape=shape)] for shape in SHAPES}
    figures.bars(right, labels, tails)
    right.set_yscale("log")
    right.set_ylabel("p99 time to first token (s)")
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=8)
    figures.save(figure, out_dir, "length_shapes.png")


def main(config: Config) -> None:
    systems = [system.name for system in chosen_systems(config.systems)]
    rates = rates_of(config.rates, systems)
    points = [
        (shape, Load(system, OPT_13B, lengths, config.duration_s, seed=config.seed), rates[system])
        for system in systems
        for shape, lengths in SHAPES.items()
    ]
    rows = grid(measure, points, config, unit="case", processes=config.processes)
    comparison = compare(rows)
    title = "The same mean lengths: KV slots under overload (%), times to first token"
    report(title, rows, config, columns=COLUMNS, comparison=comparison)
    plot(rows, config.out_dir)
    print(*comparison, sep="\n")


def claims(results: Results) -> Iterator[Claim]:
    """Uniform lengths hide the tail of log-normal ones."""
    for system in dict.fromkeys(row["system"] for row in results["cases"]):
        rows = {row["shape"]: row for row in chosen(results["cases"], system=system)}
        compared = rows["uniform"], rows["lognormal"]
        fragmented = [row["internal"] + row["external"] for row in compared]
        tails = [row["ttft_p99_s"] for row in compared]
        yield Claim(
            f"{SYSTEMS[system].label}: the same mean lengths, uniform and log-normal",
            "-",
            f"fragmentation {fragmented[0]:.1f} and {fragmented[1]:.1f} % of the pool, p99 time to "
            f"first token {tails[0]:.3g} and {tails[1]:.3g} s",
            "uniform lengths show a tail a tenth shorter, or less",
            tails[1] >= 1.1 * tails[0],
            "waiting is short at this rate",
        )


if __name__ == "__main__":
    run(main, Config)
