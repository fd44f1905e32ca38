"""What sharing gains: request rates sustained with parallel sampling and beam search (Figure 14).

    python -m experiments.paper.fig14_parallel_and_beam --quick
    python -m experiments.paper.fig14_parallel_and_beam
    python -m experiments.paper.fig14_parallel_and_beam --lengths=sharegpt --methods=beam

Simulated on OPT-13B and an A100-40GB with Alpaca's lengths, as in the paper: requests for several
samples, or for beams of several widths. With paging the sequences of a request share the blocks
that they have in common; the baselines reserve contiguous memory for each, and copy what branches.
The next tokens of beams are drawn so that they branch and die as a model's do
(`paged_jax/simulation/branching.py`). `rate` and `gain` are those of
`experiments.paper.fig12_throughput`; the paper's gain over Orca (Oracle) grows from 1.3 without
branches to 2.3 with six beams.

Expect two minutes with --quick and half an hour without on two cores. curves.csv has all runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from experiments.lib import option, report, run
from experiments.lib.claims import Claim, Results, chosen, claim, figure, in_order, within_percent
from experiments.paper.requests import LENGTHS, note_on_length
from experiments.paper.setups import ORCA, SETUPS, SYSTEMS
from experiments.paper.simulations import SearchOptions, Sustained, find_panels, save_curves
from paged_jax.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Config(SearchOptions):
    methods: tuple[Literal["parallel", "beam"], ...] = option(
        ("parallel", "beam"), "Sequences of a request come about by these methods."
    )
    widths: tuple[int, ...] = option((2, 4, 6), "Samples or beams.", quick=(6,), least=2)
    systems: tuple[str, ...] = option(
        (*ORCA, "paged"), "Systems to compare.", quick=("orca_oracle", "paged"), choices=SYSTEMS
    )
    lengths: str = option("alpaca", "Requests have lengths of this kind.", choices=LENGTHS)
    model: str = option("OPT-13B", "The paper's set-up of this model serves.", choices=SETUPS)
    duration_s: float = option(300.0, "Requests arrive for so long (s).", quick=40.0, least=1)


FRACTIONS = (0.4, 0.8)  # of the sustained rate, run for the curves
PAPER_GAIN = {("basic", 1): 1.3, ("beam", 6): 2.3}  # over Orca (Oracle), Alpaca


def params_of(method: str, width: int) -> SamplingParams:
    if method == "beam":
        return SamplingParams(beam_width=width, temperature=0)
    return SamplingParams(n=width, temperature=1.0)


def row_of(kind: tuple[str, int], found: Sustained) -> dict[str, Any]:
    """What one system sustains, in requests/s."""
    method, width = kind
    load, at = found.load, found.point
    is_papers = load.system == "orca_oracle" and load.lengths == "alpaca"
    return {
        "method": method,
        "width": width,
        "system": load.system,
        "rate": found.rate,  # None: the objective is not met at any rate
        "gain": found.gain,  # of paging over it
        "paper": PAPER_GAIN.get(kind) if is_papers else None,
        "batch_size": at and at.mean_batch_size,  # sequences, at that rate
        "preemptions": at and at.num_preemptions,
    }


def main(config: Config) -> None:
    deployment = SETUPS[config.model]
    lengths, duration_s = config.lengths, config.duration_s
    print(note_on_length(lengths, deployment.model.max_model_len, config.seed))
    loads = {
        kind: config.loads_of(deployment, lengths, duration_s, params=params_of(*kind))
        for kind in [("basic", 1), *product(config.methods, config.widths)]
    }
    panels = find_panels(loads, config, fractions=FRACTIONS)
    rows = [row_of(kind, found) for kind, own in panels.items() for found in own]
    title = f"Sustained within {config.objective_s:g} s per output token: {deployment.name}"
    report(f"{title}, {lengths}", rows, config, duration_s=duration_s)
    names, columns = ("method", "width"), len(panels)
    save_curves(panels, config.out_dir, "parallel_and_beam.png", names=names, columns=columns)


def claims(results: Results) -> Iterator[Claim]:
    """The paper's gains, and that they grow with the width of the beams."""
    rows = chosen(results["cases"], system="orca_oracle")
    for row in [row for row in rows if row["paper"] is not None]:
        yield claim(
            f"{row['method']} {row['width']}: request rate of paging over Orca (Oracle)",
            paper=figure(row["paper"]),
            found=row["gain"],
            rule=within_percent(25, row["paper"]),
            note="with many beams, much of a step is the time that the cost model assumes a host "
            "takes for each sequence (0.1 ms), and paging runs three times as many: without it, "
            "the gain at six beams is 1.7. Orca's copies of whole beams are taken to run at the "
            "memory's bandwidth. Without branches, Oracle's rate depends on the spread of Alpaca's "
            "lengths, which is not published",
        )
    by_kind = {(row["method"], row["width"]): row["gain"] for row in rows}
    basic = by_kind.get(("basic", 1))
    beams = [gain for (method, _), gain in sorted(by_kind.items()) if method == "beam"]
    if basic is not None and beams:
        yield claim(
            "the gain grows with the width of beam search",
            paper=" to ".join(map(figure, PAPER_GAIN.values())),
            found=(basic, *beams),
            ours=" < ".join(map(figure, (basic, *beams))),
            rule=in_order("each above the one before"),
        )


if __name__ == "__main__":
    run(main, Config)
