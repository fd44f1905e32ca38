"""What each memory manager does with its KV slots: tokens, reservations, fragmentation (Figure 2).

    python -m experiments.paper.fig02_memory_waste --quick
    python -m experiments.paper.fig02_memory_waste
    python -m experiments.paper.fig02_memory_waste --runs=simulated --lengths=sharegpt,alpaca

Where the slots are that hold no token, over time, while requests wait: only then does memory limit
what runs. Two runs:

    simulated  OPT-13B on an A100-40GB, 15.7K slots, as in the paper
    real       SmolLM2 with a shorter longest sequence; pool, lengths and blocks scaled likewise:
               the same engine and kernels over each manager, and whether the outputs are the same

The paper publishes the mean lengths alone. `sharegpt_served` has them, and outputs that vary as
much as its figures imply: token states and reservations, over the batch sizes of Figure 13, come to
717 to 757 tokens a sequence. That is one number; how the policies differ follows from it.
`sharegpt` and `sharegpt_trace` vary as ShareGPT V3 does: running sequences become shorter, which
shows in Max's internal fragmentation. Where a share is more than 5 points off, a line says why.

Expect two minutes with --quick and 15 minutes without on two CPU cores.
"""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from experiments.lib import engine_options, figures, grid, option, print_rows, run, write_results
from experiments.lib.claims import Claim, Results, Rows, Rule, at_least, chosen, claim, in_order
from experiments.lib.driver import serve
from experiments.paper.fig13_batched_requests import PAPER_BATCH_SIZE
from experiments.paper.requests import LENGTHS, scaled_lengths
from experiments.paper.setups import OPT_13B, ORCA, SYSTEMS, System, chosen_systems
from experiments.paper.simulations import Load, SystemOptions
from experiments.paper.waste import CATEGORIES, Waste, plot_shares, waste_of
from paged_jax import Engine, SamplingParams
from paged_jax.loading import load_config
from paged_jax.workloads import VocabRange, WorkloadRequest, build_workload


@dataclass(frozen=True, kw_only=True)
class Config(SystemOptions):
    runs: tuple[Literal["simulated", "real"], ...] = option(("simulated", "real"), "Runs to make.")
    lengths: tuple[str, ...] = option(("sharegpt_served",), "Simulated lengths.", choices=LENGTHS)
    rate: float | None = option(
        None, "Rate of simulated requests (1/s). By default 4, of alpaca's lengths 120."
    )
    duration_s: float = option(3600.0, "Simulated seconds of arrivals.", quick=900.0, least=1)
    model: str = option("smollm2", "Name or path of the real model.")
    num_real_requests: int = option(128, "The real model gets so many requests.", quick=48, least=1)
    real_max_model_len: int = option(1024, "Longest real sequence (tokens).", quick=256, least=16)
    # The paper's; with --quick, few requests are to fill it.
    real_pool: float = option(7.68, "The real pool, in longest sequences.", quick=3.3, least=1)
    max_num_seqs: int = option(48, "So many real sequences run at a time.", quick=24, least=1)
    max_num_batched_tokens: int = option(128, "Tokens of a real iteration.", quick=64, least=1)
    block_size: int = option(16, "Slots (tokens) of a KV block; the real run scales it.", least=1)


PAPER_PERCENT = {  # token states, reserved, internal and external fragmentation
    "orca_max": (20.4, 13.3, 57.3, 8.9),
    "orca_pow2": (26.8, 17.9, 13.6, 41.6),
    "orca_oracle": (38.2, 25.2, 0.0, 36.6),
}
PAPER_PAGED_TOKENS = 96.3
POINTS = 5  # by which a share may be off before a reason is given
SHAREGPT = ("sharegpt", "sharegpt_served", "sharegpt_trace")  # whose lengths Figure 2 is of


def paper_shares(name: str) -> tuple[float, ...] | None:
    """Figure 2's shares; with paging, which leaves slots free here, token states alone."""
    if name == "paged":
        return PAPER_PAGED_TOKENS, 0.0, 0.0, 0.0, 0.0
    paper = PAPER_PERCENT.get(name)
    return paper and (*paper, 0.0)


def row_of(
    run: str, lengths: str, system: str, waste: Waste, same: bool | None = None
) -> dict[str, Any]:
    """Percent of the pool over the time in which requests waited."""
    paper, is_paged = paper_shares(system), system == "paged"
    off = None  # of the share that is furthest from the paper's, in points
    if paper and lengths in SHAREGPT:
        ours = [waste.used_as_tokens] if is_paged else waste.shares.values()
        off = max(abs(share - its) for share, its in zip(ours, paper, strict=False))
    return {
        "run": run,
        "lengths": lengths,
        "system": system,
        **waste.shares,
        "used_as_tokens": waste.used_as_tokens,  # token states in percent of what is held
        "paper_tokens": paper and paper[0],
        "off_points": off,
        "batch_size": waste.batch_size,
        # Tokens that a running sequence has and will have; paging reserves nothing for the latter.
        "tokens_to_come": None if is_paged else waste.tokens_to_come,
        "same_outputs": same,  # as with blocks
    }


# Simulated


def simulated_row(point: tuple[Load, float]) -> dict[str, Any]:
    load, rate = point
    waste = waste_of(load.simulate(rate, cut=True).iterations)
    return row_of("simulated", load.lengths, load.system, waste)


def simulated_rows(config: Config) -> Rows:
    size = config.block_size
    points = [
        (load, config.rate or (120.0 if lengths == "alpaca" else 4.0))
        for lengths in config.lengths
        for load in config.loads_of(OPT_13B, lengths, config.duration_s, block_size=size)
    ]
    return grid(simulated_row, points, config, unit="run", processes=config.processes)


# Real


def real_run(
    config: Config, requests: list[WorkloadRequest], system: System
) -> tuple[Waste, list[list[int]]]:
    """Where the pool's slots went, and each request's tokens."""
    max_model_len = config.real_max_model_len
    block_size = max(1, config.block_size * max_model_len // OPT_13B.model.max_model_len)
    options = engine_options(config) | {
        "memory_policy": system.memory_policy,
        "scheduling_policy": system.scheduling_policy,
        "block_size": block_size,
        "num_blocks": int(config.real_pool * max_model_len) // block_size,
        "max_model_len": max_model_len,
        "enable_prefix_caching": False,  # requests share nothing with each other
    }
    with closing(Engine(config.model, **options)) as engine:
        engine.warm_up(progress=False)
        run = serve(engine, requests, SamplingParams(temperature=0))
    if refused := [served.refusal for served in run.served if served.refusal]:
        raise ValueError(refused[0])
    tokens = [list(s.output.outputs[0].token_ids) for s in run.served if s.output is not None]
    return waste_of(run.steps), tokens


def real_rows(config: Config, systems: list[System]) -> Rows:
    requests, notes = build_workload(
        "lengths",
        lengths=scaled_lengths(config.real_max_model_len / OPT_13B.model.max_model_len),
        num_requests=config.num_real_requests,
        max_model_len=config.real_max_model_len,
        vocab=VocabRange(0, load_config(config.model).vocab_size),
        seed=config.seed,
    )
    print("\n".join([*notes, f"{len(requests)} requests to {config.model} with each system"]))
    runs = grid(partial(real_run, config, requests), systems, config, unit="run")
    by_system = {system.name: run for system, run in zip(systems, runs, strict=True)}
    _, wanted = by_system.get("paged", (None, None))
    return [
        row_of("real", "scaled", name, waste, None if wanted is None else tokens == wanted)
        for name, (waste, tokens) in by_system.items()
    ]


# Results


def explanation(row: dict[str, Any], block_size: int) -> str:
    """Why the row's shares are further than `POINTS` from the paper's."""
    line = "{run}, {lengths}, {system}: {off_points:.1f} points off: ".format_map(row)
    system, to_come = row["system"], row["tokens_to_come"]
    if to_come is None:
        return f"{line}sequences end in blocks of {block_size} half full"
    # Figure 2's shares over the batch sizes of Figure 13.
    paper = sum(PAPER_PERCENT[system][:2]) / 100 * OPT_13B.num_slots
    paper /= PAPER_BATCH_SIZE["sharegpt", 2.0][system]
    if abs(to_come / paper - 1) <= 0.05:
        return f"{line}lengths agree, so it is how reservations are rounded up"
    return (
        f"{line}running sequences come to hold {to_come:.0f} tokens, the paper's {paper:.0f}, so "
        f"{'less' if to_come < paper else 'more'} of what is reserved is used"
    )


def print_tables(rows: Rows) -> None:
    titles = {"token_states": "tokens", "paper_tokens": "paper: tokens", "off_points": "off by"}
    names = ("lengths", "system", *CATEGORIES, "paper_tokens", "off_points", "batch_size")
    columns = {name: titles.get(name, name.replace("_", " ")) for name in names}
    for name, group in groupby(rows, itemgetter("run")):
        of_run = list(group)
        print_rows(f"KV slots while requests wait (%), {name}", of_run, columns)
        if used := [row["used_as_tokens"] for row in of_run if row["system"] == "paged"]:
            shares = ", ".join(f"{share:.1f}" for share in used)
            print(f"with blocks, token states are {shares} % of the slots that are not free")
    if compared := [row for row in rows if row["same_outputs"] is not None]:
        differing = ", ".join(row["system"] for row in compared if not row["same_outputs"])
        print(f"outputs that differ from those with blocks: {differing or 'none'}")


def plot(rows: Rows, systems: list[System], out_dir: str) -> None:
    """Stacked bars as in the paper: each system, and the paper's beside it."""
    groups = {}
    for system in systems:
        groups[system.label] = {
            f"{row['run']}\n{row['lengths']}": [row[name] for name in CATEGORIES]
            for row in chosen(rows, system=system.name)
        }
        if (paper := paper_shares(system.name)) is not None:
            groups[system.label]["paper"] = [*paper]
    num_bars = sum(map(len, groups.values()))
    figure, axes = figures.panels(size=(1.1 * num_bars + 2, 4.5))
    plot_shares(axes[0, 0], groups)
    axes[0, 0].set_ylabel("KV slots (%)")
    figures.save(figure, out_dir, "memory_waste.png")


def main(config: Config) -> None:
    systems = chosen_systems(config.systems)
    rows = simulated_rows(config) if "simulated" in config.runs else []
    if "real" in config.runs:
        rows += real_rows(config, systems)
    off = [row for row in rows if (row["off_points"] or 0) > POINTS]
    explanations = [explanation(row, config.block_size) for row in off]
    print_tables(rows)
    write_results(rows, config, paper_percent=PAPER_PERCENT, explanations=explanations)
    plot(rows, systems, config.out_dir)
    for line in explanations:
        print(line)


# The paper's claims


def claims(results: Results) -> Iterator[Claim]:
    """The shares of each system, and the order of the systems, for each kind of lengths."""

    def shares(values: Iterable[float], between: str = " / ") -> str:
        return between.join(f"{share:.1f}" for share in values)

    rows = chosen(results["cases"], run="simulated", lengths="sharegpt")
    for lengths, group in groupby(rows, itemgetter("lengths")):
        by_system = {row["system"]: row for row in group}
        for name in [name for name in ORCA if name in by_system]:
            row, where = by_system[name], f"simulated, {lengths}, {name}:"
            yield claim(
                f"{lengths}, {SYSTEMS[name].label}: token states / reserved / internal / external",
                paper=shares(results["paper_percent"][name]),
                found=row["off_points"],
                ours=shares(row[category] for category in CATEGORIES[:4]),
                rule=Rule(f"each within {POINTS} points", lambda off: off <= POINTS),
                note="; ".join(line for line in results["explanations"] if where in line),
            )
        if "paged" in by_system:
            tokens = by_system["paged"]["used_as_tokens"]
            yield claim(
                f"{lengths}, paging: token states, of the slots in use",
                paper=f"{PAPER_PAGED_TOKENS} %",
                found=tokens,
                ours=f"{tokens:.1f} %",
                rule=at_least(96, " %"),
            )
        order = [by_system[name]["token_states"] for name in (*ORCA, "paged") if name in by_system]
        yield claim(
            f"{lengths}: order of token states",
            paper="Max < Pow2 < Oracle < vLLM",
            found=order,
            ours=shares(order, " < "),
            rule=in_order(),
        )


if __name__ == "__main__":
    run(main, Config)
