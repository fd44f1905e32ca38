"""What uniform lengths hide: the same mean lengths, other waste and another tail.

    python -m experiments.costs.length_shapes --quick
    python -m experiments.costs.length_shapes
    python -m experiments.costs.length_shapes --systems=orca_oracle,paged --rates=orca_oracle:1.1,paged:2

Benchmarks often give all requests the same length, or lengths drawn evenly from a range. Here
OPT-13B on an A100-40GB (simulated) serves requests whose prompts and outputs have the means of the
paper's ShareGPT workload in any case, and are

    constant    all of these lengths
    uniform     drawn evenly from 1 to twice the mean
    lognormal   as served in the paper (`sharegpt_served`): many short, few very long

Waste is what `memory_waste` shows: shares of the pool over time, with more requests than the system
can serve. Tails are those of the time to first token at a rate that the system sustains, run to its
end. Reservations of equal lengths fit each other like tiles, or just not: then a pool looks better
or worse than it is. And where all requests take equally long, none holds up many others.

Expect a minute with --quick, and 5 minutes without on two CPU cores. --out_dir gets results.json,
results.csv and length_shapes.png.
"""

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags

from experiments.lib import reporting
from experiments.lib.parallel import run_all
from experiments.lib.reporting import preset
from experiments.paper.setups import find_setup
from experiments.paper.systems import SYSTEMS, chosen_systems
from experiments.paper.waste import Waste, waste_of
from paged_jax.simulation.run import simulate
from paged_jax.workloads import (
    SERVED_LENGTHS,
    Lengths,
    Uniform,
    VocabRange,
    WorkloadRequest,
    arrive_poisson,
    build_workload,
)

_QUICK = flags.DEFINE_bool("quick", False, "Ten minutes of simulated time instead of an hour.")
_SYSTEMS = flags.DEFINE_list(
    "systems", ["orca_max", "orca_pow2", "orca_oracle", "paged"], "What is compared."
)
_RATES = flags.DEFINE_list(
    "rates",
    ["orca_max:0.6", "orca_pow2:0.8", "orca_oracle:1.0", "paged:1.8"],
    "system:requests/s for the tails; the default is about 80 % of what each sustains with "
    "log-normal lengths.",
)
_DURATION_S = flags.DEFINE_float(
    "duration_s",
    None,
    "Simulated time in which requests arrive; default: 3600, or 600 with --quick.",
    lower_bound=1,
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths and arrivals.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/length_shapes", "Where the results go.")

OPT_13B = find_setup("OPT-13B").deployment
BLOCK_SIZE = 16
OVERLOAD = 4.0  # requests/s, more than any of the systems can serve
MEAN_PROMPT, MEAN_OUTPUT = 161, 338  # section 6.1, in whole tokens
SHAPES = {
    "constant": Lengths(Uniform(MEAN_PROMPT, MEAN_PROMPT), Uniform(MEAN_OUTPUT, MEAN_OUTPUT)),
    "uniform": Lengths(Uniform(1, 2 * MEAN_PROMPT - 1), Uniform(1, 2 * MEAN_OUTPUT - 1)),
    "lognormal": SERVED_LENGTHS["sharegpt_served"],
}


class Item(NamedTuple):
    """A shape of lengths, and a system at a rate (requests/s) that serves them."""

    shape: str
    system: str
    rate: float
    duration_s: float
    seed: int


class Case(NamedTuple):
    """Shares in percent of the pool, under overload; times at `rate`."""

    shape: str
    system: str
    mean_prompt_tokens: float
    mean_output_tokens: float
    token_states: float
    reserved: float
    internal: float
    external: float
    free: float
    batch_size: float  # under overload
    rate: float  # requests/s
    ttft_p50_s: float
    ttft_p99_s: float
    normalised_latency_s: float  # mean
    num_preemptions: int


class Tail(NamedTuple):
    mean_prompt_tokens: float
    mean_output_tokens: float
    ttft_p50_s: float
    ttft_p99_s: float
    normalised_latency_s: float
    num_preemptions: int


def requests_of(item: Item) -> list[WorkloadRequest]:
    """Those that arrive in the duration, by the same arrivals for every shape and system."""
    count = int(item.rate * item.duration_s * 1.1) + 50
    requests, _ = build_workload(
        "lengths",
        lengths=SHAPES[item.shape],
        num_requests=count + count // 20,  # some do not fit
        max_model_len=OPT_13B.model.max_model_len,
        vocab=VocabRange(0, 50_000),
        seed=item.seed,
    )
    arrived = arrive_poisson(requests[:count], rate=item.rate, seed=item.seed)
    return [request for request in arrived if request.arrival_s < item.duration_s]


def waste_under_overload(item: Item) -> Waste:
    """In a process of its own, as is `tail`."""
    system = SYSTEMS[item.system]
    run = simulate(
        requests_of(item),
        system.config(OPT_13B, BLOCK_SIZE),
        system.cost(OPT_13B),
        horizon_s=item.duration_s,
    )
    return waste_of(run.iterations)


def tail(item: Item) -> Tail:
    system = SYSTEMS[item.system]
    run = simulate(requests_of(item), system.config(OPT_13B, BLOCK_SIZE), system.cost(OPT_13B))
    ttft = [request.ttft_s for request in run.finished if request.ttft_s is not None]
    p50, p99 = np.percentile(ttft, [50, 99]).tolist()
    assert run.normalised_latency_s is not None
    return Tail(
        float(np.mean([request.num_prompt_tokens for request in run.requests])),
        float(np.mean([request.max_tokens for request in run.requests])),
        p50,
        p99,
        run.normalised_latency_s,
        run.num_preemptions,
    )


def measure(item: Item) -> Waste | Tail:
    return waste_under_overload(item) if item.rate == OVERLOAD else tail(item)


def parse_rates(texts: list[str]) -> dict[str, float]:
    """Requests/s by system, from `system:rate`."""
    rates = {}
    for text in texts:
        name, _, rate = text.partition(":")
        try:
            rates[name] = float(rate)
        except ValueError:
            raise ValueError(f"--rates takes system:rate, as in paged:1.8, got {text!r}") from None
        if not 0 < rates[name] < OVERLOAD:
            raise ValueError(f"--rates must lie above 0 and below {OVERLOAD:g}, got {text!r}")
    return rates


def case_of(tail_item: Item, waste: Waste, tail: Tail) -> Case:
    return Case(
        tail_item.shape,
        tail_item.system,
        tail.mean_prompt_tokens,
        tail.mean_output_tokens,
        waste.token_states,
        waste.reserved,
        waste.internal,
        waste.external,
        waste.free,
        waste.batch_size,
        tail_item.rate,
        *tail[2:],
    )


def compare(cases: list[Case]) -> list[str]:
    """What each system would be thought to do by its constant lengths, and what it does."""
    lines = []
    for system in dict.fromkeys(case.system for case in cases):
        of = {case.shape: case for case in cases if case.system == system}
        shapes = ("constant", "uniform", "lognormal")
        wasted = " / ".join(f"{of[s].internal + of[s].external:.1f}" for s in shapes)
        waits = " / ".join(f"{of[s].ttft_p99_s:.3g}" for s in shapes)
        lines.append(
            f"{SYSTEMS[system].label}: fragmentation {wasted} % of the pool, p99 time to first "
            f"token {waits} s at {of['constant'].rate:g} requests/s ({' / '.join(shapes)})"
        )
    return lines


def plot(cases: list[Case], path: str) -> None:
    """Shares on the left, tails on the right."""
    systems = list(dict.fromkeys(case.system for case in cases))
    shapes = list(SHAPES)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    width = 0.8 / len(shapes)
    kinds = ("token_states", "reserved", "internal", "external", "free")
    colours = ("tab:green", "tab:olive", "tab:orange", "tab:red", "0.9")
    for number, shape in enumerate(shapes):
        for place, system in enumerate(systems):
            [case] = [c for c in cases if (c.shape, c.system) == (shape, system)]
            x, bottom = place + width * number, 0.0
            for kind, colour in zip(kinds, colours, strict=True):
                share = getattr(case, kind)
                left.bar(x, share, width * 0.9, bottom=bottom, color=colour)
                bottom += share
            left.text(x, 1, shape, rotation=90, ha="center", va="bottom", fontsize=7)
        tails = [c.ttft_p99_s for s in systems for c in cases if (c.shape, c.system) == (shape, s)]
        places = [place + width * number for place in range(len(systems))]
        right.bar(places, tails, width * 0.9, label=shape)
    rates = {case.system: case.rate for case in cases}
    middle = [place + width for place in range(len(systems))]
    left.set_xticks(middle, [SYSTEMS[s].label for s in systems])
    right.set_xticks(middle, [f"{SYSTEMS[s].label}\n{rates[s]:g} requests/s" for s in systems])
    left.set_ylabel("KV slots under overload (%)")
    left.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours],
        ["token states", "reservation", "internal", "external", "free"],
        fontsize=7,
        loc="upper center",
        ncols=5,
        bbox_to_anchor=(0.5, 1.1),
    )
    right.set_yscale("log")
    right.set_ylabel("p99 time to first token (s)")
    right.legend(fontsize=7, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    systems = [system.name for system in chosen_systems(_SYSTEMS.value)]
    rates = parse_rates(_RATES.value)
    if missing := [name for name in systems if name not in rates]:
        raise ValueError(f"--rates has no rate for {', '.join(missing)}")
    duration_s = preset(_DURATION_S, _QUICK.value, quick=600.0, full=3600.0)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    grid = [(shape, system) for system in systems for shape in SHAPES]
    tails = [Item(shape, name, rates[name], duration_s, _SEED.value) for shape, name in grid]
    overloads = [item._replace(rate=OVERLOAD) for item in tails]
    measured = run_all(measure, [*overloads, *tails], description="simulated", unit="run")
    wastes, found = measured[: len(grid)], measured[len(grid) :]
    cases = []
    for item, waste, of_tail in zip(tails, wastes, found, strict=True):
        assert isinstance(waste, Waste)
        assert isinstance(of_tail, Tail)
        cases.append(case_of(item, waste, of_tail))
    reporting.print_table(
        "The same mean lengths: KV slots under overload (%), times to first token",
        ("lengths", "system", "tokens", "internal", "external", "batch", "rate", "p50 s", "p99 s"),
        [
            (
                case.shape,
                case.system,
                case.token_states,
                case.internal,
                case.external,
                case.batch_size,
                case.rate,
                case.ttft_p50_s,
                case.ttft_p99_s,
            )
            for case in cases
        ],
    )
    lines = compare(cases)
    reporting.write_cases([case._asdict() for case in cases], out_dir, _QUICK, comparison=lines)
    plot(cases, str(out_dir / "length_shapes.png"))
    print(*lines, f"results in {out_dir}", sep="\n")


if __name__ == "__main__":
    reporting.run(main)
