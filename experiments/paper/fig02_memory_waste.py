"""What each memory manager does with its KV slots: tokens, reservations, fragmentation (Figure 2).

    python -m experiments.paper.fig02_memory_waste --quick
    python -m experiments.paper.fig02_memory_waste
    python -m experiments.paper.fig02_memory_waste --runs=simulated --lengths=sharegpt,sharegpt_trace,alpaca

Where the slots are that hold no token, over time, while requests wait: only then does memory limit
what runs. Lengths and policies decide that, not step times. Two runs:

    simulated  OPT-13B on an A100-40GB, 15.7K slots, as in the paper
    real       SmolLM2 with a shorter longest sequence; pool, lengths and blocks scaled likewise:
               the same engine and kernels over each manager, and whether the outputs are the same

The paper publishes the mean lengths alone. `sharegpt_served` has them, and outputs that vary as
much as its figures imply: token states and reservations, over the batch sizes of Figure 13, come to
717 to 757 tokens a sequence. That is one number; how the policies differ follows from it.
`sharegpt` and `sharegpt_trace` vary as ShareGPT V3 does: running sequences become shorter, which
shows in Max's internal fragmentation. Where a share is more than 5 points off, a line says why.

Expect two minutes with --quick and 15 minutes without on two CPU cores. --out_dir gets
results.json, results.csv and memory_waste.png.
"""

from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from absl import flags

from experiments.lib import reporting
from experiments.lib.driver import serve
from experiments.lib.parallel import run_all
from experiments.lib.reporting import preset
from experiments.paper.requests import LENGTHS, check_lengths, poisson_requests
from experiments.paper.setups import find_setup
from experiments.paper.systems import SYSTEMS, System, chosen_systems
from experiments.paper.waste import CATEGORIES, Waste, waste_of
from paged_jax import Engine, SamplingParams
from paged_jax.loading import load_config
from paged_jax.simulation.run import simulate
from paged_jax.workloads import (
    SERVED_LENGTHS,
    Lengths,
    LogNormal,
    VocabRange,
    WorkloadRequest,
    build_workload,
)

_QUICK = flags.DEFINE_bool("quick", False, "A quarter of the simulated time, few real requests.")
_RUNS = flags.DEFINE_list("runs", ["simulated", "real"], "simulated, real or both.")
_LENGTHS = flags.DEFINE_list(
    "lengths", ["sharegpt_served"], f"Of the simulated runs: {', '.join(LENGTHS)}."
)
_SYSTEMS = flags.DEFINE_list(
    "systems", ["orca_max", "orca_pow2", "orca_oracle", "paged"], "What is compared."
)
_RATE = flags.DEFINE_float(
    "rate", None, "Simulated requests/s; default: 4, or 120 where lengths are alpaca's."
)
_DURATION_S = flags.DEFINE_float(
    "duration_s", None, "Simulated time; default: 3600, or 900 with --quick.", lower_bound=1
)
_MODEL = flags.DEFINE_string("model", "smollm2", "The real model's name or path.")
_NUM_REAL_REQUESTS = flags.DEFINE_integer(
    "num_real_requests", None, "Default: 128, or 48 with --quick.", lower_bound=1
)
_REAL_MODEL_LEN = flags.DEFINE_integer(
    "real_max_model_len", None, "Default: 1024, or 256 with --quick.", lower_bound=16
)
_REAL_POOL = flags.DEFINE_float(
    "real_pool",
    None,
    "Slots of the real pool, in longest sequences; default: 7.68 as in the paper, or 3.3 with "
    "--quick, where few requests are to fill it.",
    lower_bound=1,
)
_MAX_NUM_SEQS = flags.DEFINE_integer(
    "max_num_seqs",
    None,
    "Sequences of the real run at a time, at most; default: 48, or 24 with --quick.",
    lower_bound=1,
)
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens",
    None,
    "Tokens of an iteration of the real run; default: 128, or 64 with --quick.",
    lower_bound=1,
)
_BLOCK_SIZE = flags.DEFINE_integer(
    "block_size", 16, "Slots (tokens) of a KV block; scaled in the real run.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths, arrivals and prompts.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/memory_waste", "Where the results go.")

OPT_13B = find_setup("OPT-13B").deployment
PAPER_PERCENT = {  # token states, reserved, internal and external fragmentation
    "orca_max": (20.4, 13.3, 57.3, 8.9),
    "orca_pow2": (26.8, 17.9, 13.6, 41.6),
    "orca_oracle": (38.2, 25.2, 0.0, 36.6),
}
PAPER_PAGED_TOKENS = 96.3
PAPER_BATCH_SIZE = {"orca_max": 7.00, "orca_pow2": 9.81, "orca_oracle": 13.62}
POINTS = 5  # by which a share may be off before a reason is given
SHAREGPT = ("sharegpt", "sharegpt_served", "sharegpt_trace")  # whose lengths Figure 2 is of


class Case(NamedTuple):
    """Percent of the pool over the time in which requests waited."""

    run: str
    lengths: str
    system: str
    token_states: float
    reserved: float
    internal: float
    external: float
    free: float
    used_as_tokens: float  # token states in percent of what is not free
    paper_tokens: float | None
    off_points: float | None  # the share that is furthest from the paper's
    batch_size: float
    tokens_to_come: float | None  # of a running sequence, with those that are there
    same_outputs: bool | None  # as with blocks


def case_of(run: str, lengths: str, system: System, waste: Waste, same: bool | None = None) -> Case:
    shares = [getattr(waste, name) for name in CATEGORIES]
    is_paged = system.memory_policy == "paged"
    paper = PAPER_PERCENT.get(system.name)
    paper_tokens = PAPER_PAGED_TOKENS if is_paged else paper and paper[0]
    off = None
    if is_paged:
        off = abs(waste.used_as_tokens - PAPER_PAGED_TOKENS)
    elif paper:
        off = max(abs(share - other) for share, other in zip(shares, (*paper, 0.0), strict=True))
    return Case(
        run,
        lengths,
        system.name,
        waste.token_states,
        waste.reserved,
        waste.internal,
        waste.external,
        waste.free,
        waste.used_as_tokens,
        paper_tokens,
        off if lengths in SHAREGPT else None,
        waste.batch_size,
        None if is_paged else waste.tokens_to_come,  # it reserves nothing for those to come
        same,
    )


# Simulated


def simulated_waste(item: tuple[str, str, float, float, int, int]) -> Waste:
    """(lengths, system, requests/s, duration, block size, seed), in a process of its own."""
    lengths, name, rate, duration_s, block_size, seed = item
    requests = poisson_requests(
        lengths,
        rate=rate,
        duration_s=duration_s,
        max_model_len=OPT_13B.model.max_model_len,
        seed=seed,
    )
    system = SYSTEMS[name]
    run = simulate(
        requests, system.config(OPT_13B, block_size), system.cost(OPT_13B), horizon_s=duration_s
    )
    return waste_of(run.iterations)


def simulated_cases(systems: list[System]) -> list[Case]:
    duration_s = preset(_DURATION_S, _QUICK.value, quick=900.0, full=3600.0)
    grid = [(lengths, system) for lengths in _LENGTHS.value for system in systems]
    items = [
        (
            lengths,
            system.name,
            _RATE.value or (120.0 if lengths == "alpaca" else 4.0),
            duration_s,
            _BLOCK_SIZE.value,
            _SEED.value,
        )
        for lengths, system in grid
    ]
    wastes = run_all(simulated_waste, items, description="simulated", unit="run")
    return [
        case_of("simulated", lengths, system, waste)
        for (lengths, system), waste in zip(grid, wastes, strict=True)
    ]


# Real


def scaled_lengths(max_model_len: int) -> Lengths:
    """Those of `sharegpt_served`, in relation to the longest sequence."""
    served = SERVED_LENGTHS["sharegpt_served"]
    scale = max_model_len / OPT_13B.model.max_model_len

    def scaled(distribution: Any) -> LogNormal:
        return LogNormal(max(1.0, distribution.mean * scale), distribution.sigma)

    return Lengths(scaled(served.prompt), scaled(served.output))


def real_run(
    system: System, requests: list[WorkloadRequest], max_model_len: int
) -> tuple[Waste, list[list[int]]]:
    """What was where, and each request's tokens."""
    pool = preset(_REAL_POOL, _QUICK.value, quick=3.3, full=7.68) * max_model_len
    block_size = max(1, _BLOCK_SIZE.value * max_model_len // OPT_13B.model.max_model_len)
    engine = Engine(
        _MODEL.value,
        memory_policy=system.memory_policy,
        scheduling_policy=system.scheduling_policy,
        block_size=block_size,
        num_blocks=int(pool) // block_size,
        max_num_seqs=preset(_MAX_NUM_SEQS, _QUICK.value, quick=24, full=48),
        max_num_batched_tokens=preset(_MAX_NUM_BATCHED_TOKENS, _QUICK.value, quick=64, full=128),
        max_model_len=max_model_len,
        enable_prefix_caching=False,  # requests share nothing with each other
        seed=_SEED.value,
    )
    try:
        engine.warm_up()
        run = serve(engine, requests, SamplingParams(temperature=0))
    finally:
        engine.close()
    if refused := [served.refusal for served in run.served if served.refusal]:
        raise ValueError(refused[0])
    tokens = [list(s.output.outputs[0].token_ids) for s in run.served if s.output is not None]
    return waste_of(run.steps), tokens


def real_cases(systems: list[System]) -> list[Case]:
    max_model_len = preset(_REAL_MODEL_LEN, _QUICK.value, quick=256, full=1024)
    requests, notes = build_workload(
        "lengths",
        lengths=scaled_lengths(max_model_len),
        num_requests=preset(_NUM_REAL_REQUESTS, _QUICK.value, quick=48, full=128),
        max_model_len=max_model_len,
        vocab=VocabRange(0, load_config(_MODEL.value).vocab_size),
        seed=_SEED.value,
    )
    print("\n".join(notes))
    cases: list[Case] = []
    wanted: list[list[int]] | None = None
    for system in reversed(systems):  # blocks first
        print(f"{system.label}: {len(requests)} requests to {_MODEL.value}")
        waste, tokens = real_run(system, requests, max_model_len)
        if system.memory_policy == "paged":
            wanted = tokens
        same = None if wanted is None else tokens == wanted
        cases.insert(0, case_of("real", "scaled", system, waste, same))
    return cases


# Results


def paper_tokens_to_come(system: str) -> float:
    """Of a running sequence: Figure 2's token states and reservations over Figure 13's requests."""
    tokens, reserved, *_ = PAPER_PERCENT[system]
    return (tokens + reserved) / 100 * OPT_13B.num_slots / PAPER_BATCH_SIZE[system]


def explain(cases: list[Case]) -> list[str]:
    """Why shares are further than `POINTS` from the paper's."""
    lines = []
    for case in cases:
        if case.off_points is None or case.off_points <= POINTS:
            continue
        where = f"{case.run}, {case.lengths}, {case.system}: {case.off_points:.1f} points off"
        if case.tokens_to_come is None:
            lines.append(f"{where}: sequences end in blocks of {_BLOCK_SIZE.value} half full")
            continue
        paper = paper_tokens_to_come(case.system)
        ratio = case.tokens_to_come / paper
        if abs(ratio - 1) > 0.05:
            other = "less" if ratio < 1 else "more"
            lines.append(
                f"{where}: running sequences come to hold {case.tokens_to_come:.0f} tokens, the "
                f"paper's {paper:.0f}, so {other} of what is reserved is used"
            )
        else:
            lines.append(f"{where}: lengths agree, so it is how reservations are rounded up")
    return lines


def print_tables(cases: list[Case]) -> None:
    columns = ("lengths", "system", "tokens", "reserved", "internal", "external", "free")
    for run in dict.fromkeys(case.run for case in cases):
        chosen = [case for case in cases if case.run == run]
        reporting.print_table(
            f"KV slots while requests wait (%), {run}",
            (*columns, "paper: tokens", "off by", "batch size"),
            [(*case[1:8], case.paper_tokens, case.off_points, case.batch_size) for case in chosen],
        )
        if used := [case for case in chosen if case.system == "paged"]:
            shares = ", ".join(f"{case.used_as_tokens:.1f}" for case in used)
            print(f"with blocks, token states are {shares} % of the slots that are not free")
    same = {case.system: case.same_outputs for case in cases if case.same_outputs is not None}
    if same:
        differing = ", ".join(name for name, is_same in same.items() if not is_same) or "none"
        print(f"outputs that differ from those with blocks: {differing}")


def plot(cases: list[Case], path: str) -> None:
    """Stacked bars as in the paper: each system, and the paper's beside it."""
    groups = list(dict.fromkeys((case.run, case.lengths) for case in cases))
    systems = list(dict.fromkeys(case.system for case in cases))
    figure, axes = plt.subplots(
        figsize=(2.2 * len(systems) * (1 + len(groups)) / 2 + 2, 4.5), layout="constrained"
    )
    colours = ("tab:green", "tab:olive", "tab:orange", "tab:red", "0.9")
    names = ("token states", "reservation", "internal", "external", "free")
    width = 0.8 / (1 + len(groups))
    ticks: list[tuple[float, str]] = []
    for place, system in enumerate(systems):
        bars = [
            (f"{case.run}\n{case.lengths}", [getattr(case, name) for name in CATEGORIES])
            for case in cases
            if case.system == system
        ]
        if system in PAPER_PERCENT:
            bars.append(("paper", [*PAPER_PERCENT[system], 0.0]))
        elif SYSTEMS[system].memory_policy == "paged":
            bars.append(("paper", [PAPER_PAGED_TOKENS, 0.0, 0.0, 0.0, 0.0]))
        for number, (label, shares) in enumerate(bars):
            x, bottom = place + width * number, 0.0
            for share, colour in zip(shares, colours, strict=True):
                axes.bar(x, share, width * 0.92, bottom=bottom, color=colour)
                if share > 4:
                    middle = bottom + share / 2
                    axes.text(x, middle, f"{share:.1f}", ha="center", va="center", fontsize=7)
                bottom += share
            ticks.append((x, label))
        axes.text(place + width * (len(bars) - 1) / 2, 102, SYSTEMS[system].label, ha="center")
    axes.set_xticks([x for x, _ in ticks], [label for _, label in ticks], fontsize=7, rotation=60)
    axes.set_ylim(0, 108)
    axes.set_ylabel("KV slots (%)")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
    figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    if not _RUNS.value or set(_RUNS.value) - {"simulated", "real"}:
        raise ValueError(f"--runs takes simulated and real, got {','.join(_RUNS.value)}")
    check_lengths(_LENGTHS.value)
    systems = chosen_systems(_SYSTEMS.value)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    cases: list[Case] = []
    if "simulated" in _RUNS.value:
        cases += simulated_cases(systems)
    if "real" in _RUNS.value:
        cases += real_cases(systems)
    explanations = explain(cases)
    print_tables(cases)
    reporting.write_cases(
        [case._asdict() for case in cases],
        out_dir,
        _QUICK,
        paper_percent=PAPER_PERCENT,
        explanations=explanations,
    )
    plot(cases, str(out_dir / "memory_waste.png"))
    print(*explanations, f"results in {out_dir}", sep="\n")


if __name__ == "__main__":
    reporting.run(main)
