"""Which block size is best? Throughput, latency, waste and hits from 1 to 256 tokens (Figure 18b).

    python -m experiments.paper.fig18_block_size --quick
    python -m experiments.paper.fig18_block_size
    python -m experiments.paper.fig18_block_size --runs=real --real_block_size=4,16,64
    python -m experiments.paper.fig18_block_size --runs=simulated --deployment=OPT-66B

Small blocks cost the attention kernel and make tables long; large ones leave slots unused at the
end of each sequence, and prompts that begin alike share whole blocks only. Two runs:

    simulated  OPT-13B on an A100-40GB, as in the paper. What a block costs the kernel is taken from
               the paper's Figure 18a and assumed to be the same at any block size.
    real       SmolLM2 on this machine's device, with a pool that is too small for all requests

over requests of ShareGPT's and of Alpaca's lengths, and over prompts that begin with one of 16
shared prefixes, with the prefix cache. Throughput, waste, tables and hits are those of a full pool;
latencies are at --load of the rate that a block size of 16 serves (real: all requests are there at
the start). The best block sizes are those within 5 % of the lowest latency, which is what the paper
plots; its choice is 16.

Expect three minutes with --quick and half an hour without on two CPU cores.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.lib import engine_option, engine_options, figures, grid, option, report, run
from experiments.lib.claims import Claim, Results, above, chosen, claim
from experiments.lib.driver import require_fitting, serve
from experiments.lib.options import SimulationOptions
from experiments.lib.reporting import print_rows
from experiments.lib.serving_figures import complete_outputs, kv_usage, latencies
from experiments.paper.requests import LENGTHS, SHARED_PREFIXES, draw, note_on_length
from experiments.paper.setups import SETUPS, shape_of
from experiments.paper.simulations import Load, overloaded
from paged_jax import Engine, SamplingParams
from paged_jax.loading import load_model
from paged_jax.workloads import VocabRange


@dataclass(frozen=True, kw_only=True)
class Config(SimulationOptions):
    runs: tuple[Literal["simulated", "real"], ...] = option(("simulated", "real"), "Runs to make.")
    workloads: tuple[str, ...] = option(
        ("sharegpt_served", "alpaca", SHARED_PREFIXES),
        f"Kinds of lengths, {SHARED_PREFIXES} with a prefix cache.",
        choices=LENGTHS,
    )
    block_size: tuple[int, ...] = option(
        (1, 2, 4, 8, 16, 32, 64, 128, 256), "Slots of a simulated block.", least=1
    )
    real_block_size: tuple[int, ...] = option(
        (1, 4, 16, 64, 256), "Slots of a real block.", quick=(4, 16, 64), least=1
    )
    deployment: str = option("OPT-13B", "The paper's set-up that is simulated.", choices=SETUPS)
    duration_s: float = option(600.0, "Simulated seconds of arrivals.", quick=60.0, least=1)
    load: float = option(0.85, "Latencies are at this share of the rate served.", least=0.01)
    model: str = option("smollm2", "Name or path of the real model.")
    pool_tokens: int = option(2048, "The real pool has so many KV slots.", least=1)
    num_requests: int = option(16, "The real model gets so many requests.", quick=8, least=1)
    max_tokens: int = option(128, "The real outputs are cut to so many tokens.", quick=32, least=1)
    max_num_seqs: int = engine_option("max_num_seqs", 8)
    max_model_len: int = engine_option("max_model_len", 1024)
    rounds: int = option(3, "The real model serves all requests so often.", quick=1, least=1)


PAPER_BEST = {"sharegpt": "16 to 128", "alpaca": "16 to 32"}
REFERENCE = 16  # the block size that decides the rate of the latencies
TABLE_ENTRY_BYTES = 4
loaded = cache(load_model)


class Row(NamedTuple):
    """One block size; all but the simulated latencies are figures of a full pool."""

    run: str
    workload: str
    block_size: int
    tokens_per_s: float  # output tokens of finished requests
    latency_ms: float | None  # per output token, at one rate for all block sizes
    waste_percent: float  # of the slots held, those without a token
    table_percent: float  # block tables, of the memory of the slots held
    hit_percent: float | None  # of prompt tokens; None: no prefix caching
    preemptions: int


def held_figures(
    *,
    block_size: int,
    num_slots: int,
    shares: Mapping[str, float],
    num_seqs: float,
    max_model_len: int,
    token_bytes: int,
) -> tuple[float, float]:
    """(waste, tables) in percent of the slots held of `num_slots`; averages over time.

    Waste is internal fragmentation alone: slots of a prompt that is still to be computed will be
    used. A table has an entry for each block that the longest sequence can come to need.
    """
    held = num_slots * (shares["token_states"] + shares["reserved"] + shares["internal"])
    entries = num_seqs * -(-max_model_len // block_size)
    waste = 100 * (num_slots * shares["internal"]) / held
    return waste, 100 * entries * TABLE_ENTRY_BYTES / (held * token_bytes)


# Simulated


def served_rate(load: Load) -> float:
    """Requests/s that are finished when many more come; ValueError if none is."""
    num_finished = len(overloaded(load).finished)
    if not num_finished:
        raise ValueError(f"{load}: no request ends within {load.duration_s:g} s; simulate longer")
    return num_finished / load.duration_s


def simulated_row(item: tuple[Load, float]) -> Row:
    """A load, overloaded and at the rate of its latency."""
    load, rate = item
    full, latency_s = overloaded(load), load.simulate(rate).normalised_latency_s
    model = load.deployment.model
    waste, tables = held_figures(
        block_size=load.block_size,
        num_slots=load.deployment.num_slots,
        shares=full.memory_shares,
        num_seqs=full.mean_batch_size,
        max_model_len=model.max_model_len,
        token_bytes=model.kv_bytes_per_token,
    )
    return Row(
        "simulated",
        load.lengths,
        load.block_size,
        full.output_tokens_per_s,
        latency_s and 1e3 * latency_s,
        waste,
        tables,
        100 * full.sharing.hit_rate if load.enable_prefix_caching else None,
        full.num_preemptions,
    )


def simulated_rows(config: Config) -> list[Row]:
    deployment = SETUPS[config.deployment]
    every = Load("paged", deployment, "", config.duration_s, config.seed, REFERENCE)
    loads = [
        replace(every, lengths=workload, enable_prefix_caching=workload == SHARED_PREFIXES)
        for workload in config.workloads
    ]
    for load in loads:
        print(note_on_length(load.lengths, deployment.model.max_model_len, config.seed))
    served = grid(served_rate, loads, config, unit="workload", processes=config.processes)
    items = [
        (replace(load, block_size=size), config.load * rate)
        for load, rate in zip(loads, served, strict=True)
        for size in config.block_size
    ]
    return grid(simulated_row, items, config, unit="block size", processes=config.processes)


# Real


def real_rows(config: Config, block_size: int) -> list[Row]:
    """A row for each workload, all from one engine; every block size has the same memory."""
    options = engine_options(config) | {
        "block_size": block_size,
        "num_blocks": config.pool_tokens // block_size,
        "max_num_batched_tokens": max(64, config.max_num_seqs),
        "max_prefill_seqs": 4,
    }
    with closing(Engine(loaded(config.model), **options)) as engine:
        engine.warm_up(progress=False)
        return [real_row(config, engine, workload) for workload in config.workloads]


def real_row(config: Config, engine: Engine, workload: str) -> Row:
    """All requests are there at the start, their outputs cut."""
    vocab = VocabRange(0, engine.config.vocab_size)
    drawn = draw(workload, config.num_requests, config.max_model_len, config.seed, vocab)
    requests = [replace(r, max_tokens=min(r.max_tokens, config.max_tokens)) for r in drawn]
    require_fitting(engine, requests)
    before, counters = engine.sharing_stats, engine.core.scheduler.counters
    num_preempted = counters.num_preemptions
    runs = [
        # The salt hides what the rounds before have left in the cache.
        serve(engine, requests, SamplingParams(temperature=0, cache_salt=f"{workload}, {number}"))
        for number in range(config.rounds)
    ]
    steps = [step for run in runs for step in run.steps]
    seconds = [step.wall_s for step in steps]
    waste, tables = held_figures(
        block_size=engine.block_size,
        num_slots=steps[0].usage.total,
        shares=kv_usage(steps) or {},
        num_seqs=float(np.average([step.num_running for step in steps], weights=seconds)),
        max_model_len=engine.max_model_len,
        token_bytes=shape_of(engine.config, jnp.dtype(engine.dtype).itemsize).kv_bytes_per_token,
    )
    outputs = [output for run in runs for output in complete_outputs(run)]
    stats, num_tokens = engine.sharing_stats, sum(request.max_tokens for request in requests)
    queried = stats.queried_tokens - before.queried_tokens
    hits = stats.hit_tokens - before.hit_tokens
    return Row(
        "real",
        workload,
        engine.block_size,
        num_tokens / float(np.median([run.wall_s for run in runs])),
        1e3 * latencies(outputs)["normalised_latency_s"]["mean"],
        waste,
        tables,
        100 * hits / queried if workload == SHARED_PREFIXES else None,
        counters.num_preemptions - num_preempted,
    )


# Results


def best_block_sizes(rows: Sequence[Row], tolerance: float = 0.05) -> list[int]:
    """Block sizes whose latency is within `tolerance` of the lowest; rows are of one workload."""
    known = {row.block_size: row.latency_ms for row in rows if row.latency_ms is not None}
    lowest = min(known.values(), default=0.0)
    return [size for size, latency in known.items() if latency <= (1 + tolerance) * lowest]


def plot(groups: dict[tuple[str, str], list[Row]], config: Config) -> None:
    """Throughput, latency, waste and hits against block size, a line per run and workload."""
    labels = {
        "tokens_per_s": "output tokens/s, of the highest",
        "latency_ms": "latency (ms/token)",
        "waste_percent": "slots held for no token (%)",
        "hit_percent": "prompt tokens found in the cache (%)",
    }
    picture, axes = figures.panels(1, len(labels), size=(4, 3.8))
    for panel, (name, label) in zip(axes[0], labels.items(), strict=True):
        for (kind, workload), rows in groups.items():
            highest = max(row.tokens_per_s for row in rows) if name == "tokens_per_s" else 1.0
            values = [getattr(row, name) for row in rows]
            heights = [value and value / highest for value in values]
            points = list(zip([row.block_size for row in rows], heights, strict=True))
            style, colour = "o-" if kind == "simulated" else "s--", config.workloads.index(workload)
            figures.lines(panel, {f"{kind}, {workload}": points}, style, color=f"C{colour}")
        panel.set(xlabel="block size (tokens)", ylabel=label)
        figures.powers_of_two(panel, (row.block_size for rows in groups.values() for row in rows))
        if name == "latency_ms":
            panel.set_yscale("log")
        else:
            panel.set_ylim(bottom=0)
    axes[0, 0].legend(fontsize=7)
    figures.save(picture, config.out_dir, "block_size.png")


def main(config: Config) -> None:
    rows = simulated_rows(config) if "simulated" in config.runs else []
    if "real" in config.runs:
        measure = partial(real_rows, config)
        by_size = grid(measure, config.real_block_size, config, unit="block size")
        rows += chain.from_iterable(by_size)
    keys = dict.fromkeys((row.run, row.workload) for row in rows)
    groups = {key: sorted(row for row in rows if row[:2] == key) for key in keys}
    best = [
        {
            "run": kind,
            "workload": workload,
            "best": ", ".join(map(str, best_block_sizes(group))),
            "paper": PAPER_BEST.get(workload.partition("_")[0]),
        }
        for (kind, workload), group in groups.items()
    ]
    report("Block sizes", rows, config, best=best)
    print_rows("Within 5 % of the lowest latency", best)
    plot(groups, config)


# The paper's claims


def claims(results: Results) -> Iterator[Claim]:
    """The best block sizes, and what large blocks cost short requests."""
    notes = {
        "simulated": "what a block costs a kernel is assumed to be the same at any block size",
        "real": "of another model on another device: what a block costs is that of its kernel",
    }
    for row in [row for row in results["best"] if row["paper"] is not None]:
        low, high = map(int, row["paper"].split(" to "))
        best = [int(size) for size in row["best"].split(", ")]
        is_papers = REFERENCE in best or all(low <= size <= high for size in best)
        what = f"best block sizes, {row['run']}, {row['workload']}"
        rule = f"{REFERENCE} among the best, or all of them within the paper's"
        holds = is_papers if row["run"] == "simulated" else None
        yield Claim(what, row["paper"], row["best"], rule, holds, notes[row["run"]])
    rows = chosen(results["cases"], run="simulated", workload="alpaca")
    latencies = {row["block_size"]: row["latency_ms"] for row in rows}
    largest = max(latencies, default=0)
    if REFERENCE in latencies and largest > REFERENCE:
        yield claim(
            f"Alpaca: latency at {largest} over that at {REFERENCE}",
            paper="much higher",
            found=latencies[largest] / latencies[REFERENCE],
            rule=above(1.2),
        )


if __name__ == "__main__":
    run(main, Config)
