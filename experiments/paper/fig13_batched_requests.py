"""How many requests each system batches: mean batch sizes at one request rate (Figure 13).

    python -m experiments.paper.fig13_batched_requests --quick
    python -m experiments.paper.fig13_batched_requests
    python -m experiments.paper.fig13_batched_requests --loads=sharegpt:2,sharegpt_trace:2

Simulated on OPT-13B and an A100-40GB, with the same requests and arrivals for every system:
ShareGPT's lengths at 2 requests/s and Alpaca's at 30, as in the paper. It gives the means of both;
`sharegpt_served` has the spread that its figures 2 and 13 imply, `sharegpt` that of the published
file, `sharegpt_trace` that file's lengths as they are.

Means are over the time of the iterations until the last request has arrived. A system that the rate
overloads is full all the time: its batch depends on memory alone. One that is not (paging, at these
rates) has as many requests running as arrive while one runs: its batch also depends on step times.

Expect a minute with --quick, which ends after 5 minutes of simulated time, and 5 minutes for the
paper's hour.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from experiments.lib import figures, grid, option, report, run
from experiments.lib.claims import Claim, Results, claim, within_percent
from experiments.paper.requests import note_on_length
from experiments.paper.setups import SETUPS, SYSTEMS
from experiments.paper.simulations import Load, SystemOptions, parse_rate


@dataclass(frozen=True, kw_only=True)
class Config(SystemOptions):
    loads: tuple[str, ...] = option(
        ("sharegpt_served:2", "alpaca:30"), "Panels are of these loads, as lengths:requests/s."
    )
    model: str = option("OPT-13B", "The paper's set-up of this model serves.", choices=SETUPS)
    duration_s: float = option(3600.0, "A run ends after so long (s).", quick=300.0, least=1)


PAPER_BATCH_SIZE = {
    ("sharegpt", 2.0): {"orca_max": 7.00, "orca_pow2": 9.81, "orca_oracle": 13.62, "paged": 30.42},
    ("alpaca", 30.0): {"orca_max": 7.00, "orca_pow2": 43.24, "orca_oracle": 72.75, "paged": 132.44},
}


def measure(item: tuple[Load, float]) -> dict[str, Any]:
    """Averages over time of one system."""
    load, rate = item
    run = load.simulate(rate, cut=True)
    dataset, size = load.lengths.partition("_")[0], run.mean_batch_size
    paper = PAPER_BATCH_SIZE.get((dataset, rate), {}).get(load.system)
    return {
        "lengths": load.lengths,
        "rate": rate,  # requests/s
        "system": load.system,
        "batch_size": size,
        "paper": paper,  # read off the figure
        "off_percent": paper and 100 * (size / paper - 1),
        "tokens_percent": 100 * run.memory_shares["token_states"],  # in the pool
        # Requests that wait or run when the last one has arrived.
        "unfinished_percent": 100 * run.num_unfinished / len(run.requests),
        "preemptions": run.num_preemptions,
    }


def plot(rows: list[dict[str, Any]], out_dir: str) -> None:
    """A panel for each load, bars for each system, the paper's beside."""
    panels = [list(group) for _, group in groupby(rows, itemgetter("lengths", "rate"))]
    figure, axes = figures.panels(1, len(panels), size=(4.5, 3.5))
    for panel, group in zip(axes[0], panels, strict=True):
        labels = [SYSTEMS[row["system"]].label for row in group]
        sizes = {"here": "batch_size", "paper": "paper"}
        figures.bars(panel, labels, {k: [row[v] for row in group] for k, v in sizes.items()})
        for bars in panel.containers:
            panel.bar_label(bars, fmt=lambda size: f"{size:.1f}" if size else "", fontsize=8)
        panel.set_title(f"{group[0]['lengths']}, {group[0]['rate']:g} requests/s", fontsize=10)
        panel.tick_params(axis="x", labelsize=8)
        panel.margins(y=0.1)
    axes[0, 0].set_ylabel("batched requests")
    axes[0, 0].legend(fontsize=8)
    figures.save(figure, out_dir, "batched_requests.png")


def main(config: Config) -> None:
    deployment = SETUPS[config.model]
    panels = [parse_rate("loads", "lengths:rate, as in alpaca:30", text) for text in config.loads]
    for lengths in dict.fromkeys(lengths for lengths, _ in panels):
        print(note_on_length(lengths, deployment.model.max_model_len, config.seed))
    items = [
        (load, rate)
        for lengths, rate in panels
        for load in config.loads_of(deployment, lengths, config.duration_s)
    ]
    # Short requests and paging, which come last, take longest.
    rows = grid(measure, items[::-1], config, unit="run", processes=config.processes)[::-1]
    title = f"Batched requests of {config.model}, mean over {config.duration_s:g} s"
    report(title, rows, config, duration_s=config.duration_s)
    plot(rows, config.out_dir)


def claims(results: Results) -> Iterator[Claim]:
    """The batch sizes of the paper."""
    for row in [row for row in results["cases"] if row["paper"] is not None]:
        yield claim(
            f"{row['lengths']} at {row['rate']:g} requests/s, {SYSTEMS[row['system']].label}",
            paper=f"~{row['paper']:.2f}",
            found=row["batch_size"],
            ours=f"{row['batch_size']:.2f}",
            rule=within_percent(25 if row["system"] == "paged" else 15, row["paper"]),
            note=f"{row['unfinished_percent']:.0f} % of the requests still wait or run at the end: "
            "where that is little, the batch is the request rate times how long a request runs, so "
            "it depends on step times",
        )


if __name__ == "__main__":
    run(main, Config)
