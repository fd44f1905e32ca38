"""What sharing gains: request rates sustained with parallel sampling and beam search (Figure 14).

    python -m experiments.paper.fig14_parallel_and_beam --quick
    python -m experiments.paper.fig14_parallel_and_beam
    python -m experiments.paper.fig14_parallel_and_beam --lengths=sharegpt --widths=2,4 --methods=beam

Simulated on OPT-13B and an A100-40GB with Alpaca's lengths, as in the paper: requests for several
samples, or for beams of several widths. With paging the sequences of a request share the blocks
that they have in common; the baselines reserve contiguous memory for each, and copy what branches.
The next tokens of beams are drawn so that they branch and die as a model's do
(`paged_jax/simulation/branching.py`).

`rate` is the highest request rate at which the mean latency per output token stays within
--objective_s, found by bisection to 2 %; `gain` is paging's rate over Orca (Oracle)'s. The paper's
grows from 1.3 without branches to 2.3 with six beams.

Expect two minutes with --quick and half an hour without on two cores. --out_dir gets results.json,
results.csv, curves.csv and parallel_and_beam.png.
"""

from functools import partial
from typing import NamedTuple

import matplotlib.pyplot as plt
from absl import flags

from experiments.lib import reporting
from experiments.lib.parallel import run_all
from experiments.lib.reporting import preset
from experiments.paper.requests import LENGTHS, note_on_length
from experiments.paper.setups import SETUPS, find_setup
from experiments.paper.simulations import Load, Sustained, curve_points, find_sustained, plot_panel
from experiments.paper.systems import chosen_systems
from paged_jax.sampling_params import SamplingParams

_QUICK = flags.DEFINE_bool("quick", False, "Width 6, paging and Orca (Oracle), short traces.")
_METHODS = flags.DEFINE_list("methods", ["parallel", "beam"], "parallel, beam or both.")
_WIDTHS = flags.DEFINE_list(
    "widths", None, "Samples or beams of a request; default: 2,4,6, or 6 with --quick."
)
_SYSTEMS = flags.DEFINE_list(
    "systems",
    None,
    "What is compared; default: Orca's three and paging, or with --quick orca_oracle,paged.",
)
_LENGTHS = flags.DEFINE_enum("lengths", "alpaca", LENGTHS, "Whose lengths requests have.")
_MODEL = flags.DEFINE_enum("model", "OPT-13B", list(SETUPS), "Which set-up of the paper's.")
_DURATION_S = flags.DEFINE_float(
    "duration_s", None, "How long requests arrive; default: 300, or 40 with --quick.",
    lower_bound=1,
)  # fmt: skip
_OBJECTIVE_S = flags.DEFINE_float(
    "objective_s", 0.1, "Mean latency per output token that counts as sustained.", lower_bound=1e-3
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths, arrivals and branches.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/parallel_and_beam", "Where the results go.")

FRACTIONS = (0.4, 0.8)  # of the sustained rate, run for the curves
PAPER_GAIN = {("basic", 1): 1.3, ("beam", 6): 2.3}  # over Orca (Oracle), Alpaca


class Case(NamedTuple):
    """What one system sustains, in requests/s."""

    method: str
    width: int
    system: str
    rate: float | None  # None: the objective is not met at any rate
    gain: float | None  # of paging over it
    paper: float | None  # of paging over Orca (Oracle)
    batch_size: float | None  # sequences, mean over time at that rate
    preemptions: int | None


def params_of(method: str, width: int) -> SamplingParams:
    if method == "beam":
        return SamplingParams(beam_width=width, temperature=0)
    return SamplingParams(n=width, temperature=1.0)


def case_of(method: str, width: int, found: Sustained, paged_rate: float | None) -> Case:
    at = next((point for point in found.points if point.rate == found.rate), None)
    system = found.load.system
    is_papers = system == "orca_oracle" and found.load.lengths == "alpaca"
    return Case(
        method,
        width,
        system,
        found.rate,
        paged_rate / found.rate if paged_rate and found.rate else None,
        PAPER_GAIN.get((method, width)) if is_papers else None,
        None if at is None else at.mean_batch_size,
        None if at is None else at.num_preemptions,
    )


def plot(found: dict[tuple[str, int], list[Sustained]], path: str) -> None:
    """A panel for each method and width, a line for each system."""
    figure, all_axes = plt.subplots(
        1, len(found), figsize=(3.6 * len(found), 3.2), squeeze=False, layout="constrained"
    )
    for axes, ((method, width), results) in zip(all_axes[0], found.items(), strict=True):
        plot_panel(axes, results)
        axes.set_title(f"{method} {width}", fontsize=10)
    all_axes[0][0].set_ylabel("normalised latency (s/token)")
    all_axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    is_quick = _QUICK.value
    if not _METHODS.value or set(_METHODS.value) - {"parallel", "beam"}:
        raise ValueError(f"--methods takes parallel and beam, got {','.join(_METHODS.value)}")
    widths = [6] if is_quick else [2, 4, 6]
    if _WIDTHS.value:
        widths = reporting.integers(_WIDTHS, 2)
    everything = ["orca_max", "orca_pow2", "orca_oracle", "paged"]
    systems = chosen_systems(_SYSTEMS.value or (everything[2:] if is_quick else everything))
    duration_s = preset(_DURATION_S, is_quick, quick=40.0, full=300.0)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    deployment = find_setup(_MODEL.value).deployment
    print(note_on_length(_LENGTHS.value, deployment.model.max_model_len, _SEED.value))
    kinds = [("basic", 1), *((method, width) for method in _METHODS.value for width in widths)]
    loads = {
        (method, width, system.name): Load(
            system.name,
            deployment,
            _LENGTHS.value,
            duration_s,
            seed=_SEED.value,
            params=params_of(method, width),
        )
        for method, width in kinds
        for system in systems
    }
    search = partial(find_sustained, objective_s=_OBJECTIVE_S.value, fractions=FRACTIONS)
    # Paging serves the most, and most of it without branches.
    order = sorted(loads, key=lambda key: key[2] != "paged")
    results = run_all(
        search, [loads[key] for key in order], description="sustained rates", unit="system"
    )
    done = dict(zip(order, results, strict=True))
    found = {
        (method, width): [done[method, width, system.name] for system in systems]
        for method, width in kinds
    }
    cases, curve = [], []
    for (method, width), of_kind in found.items():
        paged = next((f.rate for f in of_kind if f.load.system == "paged"), None)
        cases += [case_of(method, width, result, paged) for result in of_kind]
        curve += [
            {"method": method, "width": width} | point._asdict()
            for result in of_kind
            for point in curve_points(result)
        ]
    reporting.report_cases(
        f"Sustained within {_OBJECTIVE_S.value:g} s per output token: {deployment.name}, "
        f"{_LENGTHS.value}",
        [case._asdict() for case in cases],
        out_dir,
        _QUICK,
        duration_s=duration_s,
    )
    reporting.write_csv(out_dir, "curves.csv", curve)
    plot(found, str(out_dir / "parallel_and_beam.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
