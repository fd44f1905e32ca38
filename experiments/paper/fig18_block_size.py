"""Which block size is best? Throughput, latency, waste and hits from 1 to 256 tokens (Figure 18b).

    python -m experiments.paper.fig18_block_size --quick
    python -m experiments.paper.fig18_block_size
    python -m experiments.paper.fig18_block_size --runs=real --block_size=4,16,64 --model=path/to/model
    python -m experiments.paper.fig18_block_size --runs=simulated --deployment=OPT-66B

Small blocks cost the attention kernel and make tables long; large ones leave slots unused at the
end of each sequence, and prompts that begin alike share whole blocks only. Two runs:

    simulated  OPT-13B on an A100-40GB, as in the paper. What a block costs the kernel is taken from
               the paper's Figure 18a and assumed to be the same at any block size.
    real       SmolLM2 on this machine's device, with a pool that is too small for all requests

over requests of ShareGPT's and of Alpaca's lengths, and over prompts that begin with one of 16
shared prefixes, with the prefix cache.

`tokens_per_s`, `waste_percent` (slots at the ends of sequences, of those held), `table_percent`
(bytes of the static block tables, of the memory held) and `hit_percent` are those of a full pool.
`latency_ms` is the mean per output token at one rate for all block sizes, --load of what a block
size of 16 serves (real: all requests are there at the start). The best block sizes are those within
5 % of the lowest latency, which is what the paper plots; its choice is 16.

Expect three minutes with --quick and half an hour without on two CPU cores. --out_dir gets
results.json, results.csv and block_size.png.
"""

from dataclasses import replace
from typing import NamedTuple

import matplotlib.pyplot as plt
from absl import flags
from tqdm import tqdm

from experiments.lib import reporting
from experiments.lib.parallel import run_all
from experiments.lib.reporting import preset
from experiments.paper.block_sizes import (
    Row,
    SimulatedCase,
    best_block_sizes,
    served_rate,
    simulated_row,
)
from experiments.paper.requests import LENGTHS, SHARED_PREFIXES, check_lengths, note_on_length
from experiments.paper.setups import SETUPS, find_setup
from experiments.paper.simulations import Load

_QUICK = flags.DEFINE_bool("quick", False, "Short simulated runs; few block sizes and requests.")
_RUNS = flags.DEFINE_list("runs", ["simulated", "real"], "simulated, real or both.")
_WORKLOADS = flags.DEFINE_list(
    "workloads",
    ["sharegpt_served", "alpaca", SHARED_PREFIXES],
    f"Of {', '.join(LENGTHS)}; the last one with a prefix cache.",
)
_BLOCK_SIZE = flags.DEFINE_list(
    "block_size", ["1", "2", "4", "8", "16", "32", "64", "128", "256"], "Of the simulated run."
)
_REAL_BLOCK_SIZE = flags.DEFINE_list(
    "real_block_size", None, "Of the real run; default: 1,4,16,64,256, or 4,16,64 with --quick."
)
_DEPLOYMENT = flags.DEFINE_enum("deployment", "OPT-13B", list(SETUPS), "What is simulated.")
_DURATION_S = flags.DEFINE_float(
    "duration_s", None, "Simulated time; default: 600, or 60 with --quick.", lower_bound=1
)
_LOAD = flags.DEFINE_float(
    "load", 0.85, "Rate of the latencies, of what a block size of 16 serves.", lower_bound=0.01
)
_MODEL = flags.DEFINE_string("model", "smollm2", "The real model's name or path.")
_POOL_TOKENS = flags.DEFINE_integer("pool_tokens", 2048, "KV slots of the real run.", lower_bound=1)
_NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests", None, "To the real model; default: 16, or 8 with --quick.", lower_bound=1
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Cuts its outputs; default: 128, or 32 with --quick.", lower_bound=1
)
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 8, "Of the real run.", lower_bound=1)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", 1024, "Of the real run.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer(
    "rounds", None, "Real; default: 3, or 1 with --quick.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths and arrivals.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/block_size", "Where the results go.")

PAPER_BEST = {"sharegpt": "16 to 128", "alpaca": "16 to 32"}
REFERENCE = 16


class Best(NamedTuple):
    """Block sizes within 5 % of the lowest latency."""

    run: str
    workload: str
    best: str
    paper: str | None


def run_simulated(block_sizes: list[int]) -> list[Row]:
    duration_s = preset(_DURATION_S, _QUICK.value, quick=60.0, full=600.0)
    loads = [
        Load(
            "paged",
            find_setup(_DEPLOYMENT.value).deployment,
            workload,
            duration_s,
            seed=_SEED.value,
            block_size=REFERENCE,
            enable_prefix_caching=workload == SHARED_PREFIXES,
        )
        for workload in _WORKLOADS.value
    ]
    for load in loads:
        print(note_on_length(load.lengths, load.deployment.model.max_model_len, load.seed))
    served = run_all(served_rate, loads, description="what 16 serves", unit="workload")
    cases = [
        SimulatedCase(replace(load, block_size=size), _LOAD.value * rate)
        for load, rate in zip(loads, served, strict=True)
        for size in block_sizes
    ]
    return run_all(simulated_row, cases, description="simulated", unit="block size")


def run_real(block_sizes: list[int]) -> list[Row]:
    from experiments.paper.real_block_sizes import RealRuns  # imports JAX
    from paged_jax.loading import load_model

    is_quick = _QUICK.value
    rounds = preset(_ROUNDS, is_quick, quick=1, full=3)
    runs = RealRuns(
        load_model(_MODEL.value),
        pool_tokens=_POOL_TOKENS.value,
        max_num_seqs=_MAX_NUM_SEQS.value,
        max_model_len=_MAX_MODEL_LEN.value,
        num_requests=preset(_NUM_REQUESTS, is_quick, quick=8, full=16),
        max_tokens=preset(_MAX_TOKENS, is_quick, quick=32, full=128),
        rounds=rounds,
        seed=_SEED.value,
    )
    count = len(block_sizes) * len(_WORKLOADS.value) * rounds
    with tqdm(total=count, desc="real", unit="run") as bar:
        return [row for size in block_sizes for row in runs.run(size, _WORKLOADS.value, bar)]


def plot(rows: list[Row], path: str) -> None:
    """Throughput, latency, waste and hits against block size, a line per run and workload."""
    panels = [
        ("tokens_per_s", "output tokens/s, of the highest"),
        ("latency_ms", "latency (ms/token)"),
        ("waste_percent", "slots held for no token (%)"),
        ("hit_percent", "prompt tokens found in the cache (%)"),
    ]
    figure, all_axes = plt.subplots(1, 4, figsize=(16, 3.8), layout="constrained")
    for (run, workload), chosen in grouped(rows).items():
        style = {"simulated": "o-", "real": "s--"}[run]
        colour = f"C{_WORKLOADS.value.index(workload)}"
        for axes, (name, label) in zip(all_axes, panels, strict=True):
            points = [(r.block_size, getattr(r, name)) for r in chosen]
            points = [(size, value) for size, value in points if value is not None]
            if name == "tokens_per_s":
                highest = max(value for _, value in points)
                points = [(size, value / highest) for size, value in points]
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, color=colour, label=f"{run}, {workload}"
                )
            axes.set(xlabel="block size (tokens)", ylabel=label)
    sizes = sorted({row.block_size for row in rows})
    for axes, (name, _) in zip(all_axes, panels, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        if name == "latency_ms":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    all_axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def grouped(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """By run and workload, each by block size."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.run, row.workload), []).append(row)
    return {key: sorted(group, key=lambda row: row.block_size) for key, group in groups.items()}


def main() -> None:
    if not _RUNS.value or set(_RUNS.value) - {"simulated", "real"}:
        raise ValueError(f"--runs takes simulated and real, got {','.join(_RUNS.value)}")
    check_lengths(_WORKLOADS.value)
    block_sizes = reporting.integers(_BLOCK_SIZE, 1)
    real_block_sizes = [4, 16, 64] if _QUICK.value else [1, 4, 16, 64, 256]
    if _REAL_BLOCK_SIZE.value:
        real_block_sizes = reporting.integers(_REAL_BLOCK_SIZE, 1)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    rows = run_simulated(block_sizes) if "simulated" in _RUNS.value else []
    if "real" in _RUNS.value:
        rows += run_real(real_block_sizes)
    best = [
        Best(
            run,
            workload,
            ", ".join(map(str, best_block_sizes(chosen))),
            PAPER_BEST.get(workload.partition("_")[0]),
        )
        for (run, workload), chosen in grouped(rows).items()
    ]
    reporting.report_cases(
        "Block sizes",
        [row._asdict() for row in rows],
        out_dir,
        _QUICK,
        best=[row._asdict() for row in best],
    )
    reporting.print_table("Within 5 % of the lowest latency", Best._fields, best)
    plot(rows, str(out_dir / "block_size.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
