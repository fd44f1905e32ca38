"""How many requests each system batches: mean batch sizes at one request rate (Figure 13).

    python -m experiments.paper.fig13_batched_requests --quick
    python -m experiments.paper.fig13_batched_requests
    python -m experiments.paper.fig13_batched_requests --loads=sharegpt:2,sharegpt_served:2,sharegpt_trace:2

Simulated on OPT-13B and an A100-40GB, with the same requests and arrivals for every system:
ShareGPT's lengths at 2 requests/s and Alpaca's at 30, as in the paper. It gives the means of both;
`sharegpt_served` has the spread that its figures 2 and 13 imply (`SERVED_LENGTHS`), `sharegpt` that
of the published file, `sharegpt_trace` that file's lengths as they are.

Means are over the time of the iterations until the last request has arrived. A system that the rate
overloads is full all the time: its batch then depends on memory alone, on how much is reserved for
each request. One that is not (paging, at these rates) has as many requests running as arrive while
one runs, so its batch also depends on step times: on the model of the GPU.

Expect a minute with --quick, which ends after 5 minutes of simulated time, and 5 minutes for the
paper's hour. --out_dir gets results.json, results.csv and batched_requests.png.
"""

from typing import NamedTuple

import matplotlib.pyplot as plt
from absl import flags

from experiments.lib import reporting
from experiments.lib.parallel import run_all
from experiments.lib.reporting import preset
from experiments.paper.requests import check_lengths, note_on_length
from experiments.paper.setups import SETUPS, find_setup
from experiments.paper.simulations import Load, Point, serve_at
from experiments.paper.systems import SYSTEMS, chosen_systems

_QUICK = flags.DEFINE_bool("quick", False, "Five minutes of simulated time.")
_LOADS = flags.DEFINE_list(
    "loads", ["sharegpt_served:2", "alpaca:30"], "Lengths and requests/s of each panel."
)
_SYSTEMS = flags.DEFINE_list(
    "systems", ["orca_max", "orca_pow2", "orca_oracle", "paged"], "What is compared."
)
_MODEL = flags.DEFINE_enum("model", "OPT-13B", list(SETUPS), "Which set-up of the paper's.")
_DURATION_S = flags.DEFINE_float(
    "duration_s", None, "Simulated time; default: 3600, or 300 with --quick.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths and arrivals.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/batched_requests", "Where the results go.")

PAPER_BATCH_SIZE = {
    ("sharegpt", 2.0): {
        "orca_max": 7.00, "orca_pow2": 9.81, "orca_oracle": 13.62, "paged": 30.42,
    },
    ("alpaca", 30.0): {
        "orca_max": 7.00, "orca_pow2": 43.24, "orca_oracle": 72.75, "paged": 132.44,
    },
}  # fmt: skip


class Case(NamedTuple):
    """Averages over time of one system."""

    lengths: str
    rate: float  # requests/s
    system: str
    batch_size: float
    paper: float | None  # read off the figure
    off_percent: float | None  # of the paper's
    tokens_percent: float  # token states in the pool
    unfinished_percent: float  # of the requests, when the last one has arrived
    preemptions: int


def parse_loads(texts: list[str]) -> list[tuple[str, float]]:
    """(lengths, rate) of each `lengths:rate`."""
    loads = []
    for text in texts:
        name, _, rate = text.partition(":")
        try:
            loads.append((name, float(rate)))
        except ValueError:
            raise ValueError(f"--loads takes lengths:rate, as in alpaca:30, got {text!r}") from None
    check_lengths([name for name, _ in loads])
    return loads


def run(item: tuple[Load, float]) -> Point:
    """In a process of its own."""
    load, rate = item
    return serve_at(load, rate, cut=True)


def case_of(load: Load, point: Point) -> Case:
    dataset = load.lengths.partition("_")[0]
    paper = PAPER_BATCH_SIZE.get((dataset, point.rate), {}).get(load.system)
    size = point.mean_batch_size
    return Case(
        load.lengths,
        point.rate,
        load.system,
        size,
        paper,
        None if paper is None else 100 * (size / paper - 1),
        100 * point.token_states,
        100 * point.num_unfinished / point.num_requests,
        point.num_preemptions,
    )


def plot(cases: list[Case], path: str) -> None:
    """Bars of each system, the paper's beside."""
    panels = list(dict.fromkeys((case.lengths, case.rate) for case in cases))
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 3.5), squeeze=False, layout="constrained"
    )
    for axes, (lengths, rate) in zip(all_axes[0], panels, strict=True):
        chosen = [case for case in cases if (case.lengths, case.rate) == (lengths, rate)]
        for place, case in enumerate(chosen):
            sizes = [(place - 0.2, case.batch_size, "C0")]
            if case.paper is not None:
                sizes.append((place + 0.2, case.paper, "0.7"))
            for x, size, colour in sizes:
                axes.bar(x, size, width=0.38, color=colour)
                axes.annotate(f"{size:.1f}", (x, size), ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(chosen)), [SYSTEMS[c.system].label for c in chosen], fontsize=8)
        axes.set_title(f"{lengths}, {rate:g} requests/s", fontsize=10)
        axes.margins(y=0.1)
    all_axes[0][0].set_ylabel("batched requests (grey: the paper)")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    loads = parse_loads(_LOADS.value)
    systems = chosen_systems(_SYSTEMS.value)
    duration_s = preset(_DURATION_S, _QUICK.value, quick=300.0, full=3600.0)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    deployment = find_setup(_MODEL.value).deployment
    for lengths in dict.fromkeys(name for name, _ in loads):
        print(note_on_length(lengths, deployment.model.max_model_len, _SEED.value))
    items = [
        (Load(system.name, deployment, lengths, duration_s, seed=_SEED.value), rate)
        for lengths, rate in loads
        for system in systems
    ]
    points = run_all(run, items[::-1], description="simulated hours", unit="run")[::-1]
    cases = [case_of(load, point) for (load, _), point in zip(items, points, strict=True)]
    reporting.report_cases(
        f"Batched requests of {_MODEL.value}, mean over {duration_s:g} s",
        [case._asdict() for case in cases],
        out_dir,
        _QUICK,
        duration_s=duration_s,
    )
    plot(cases, str(out_dir / "batched_requests.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
