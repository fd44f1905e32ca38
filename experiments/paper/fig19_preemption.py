"""What preemption costs, by recomputing tokens or by swapping blocks to host memory (Figure 19).

    python -m experiments.paper.fig19_preemption --quick
    python -m experiments.paper.fig19_preemption
    python -m experiments.paper.fig19_preemption --runs=micro --num_tokens=1024

Micro: one sequence of --num_tokens is taken out of the cache and brought back, for each block size:

    measured   its blocks are copied to a pool in host memory and back, many blocks a step as the
               engine does it, and one a step, as the paper's system does; or its tokens are
               prefilled. On a CPU both pools lie in host memory, so that copies cost much less than
               over PCIe, and computing much more than on a GPU.
    A100       the same for OPT-13B on an A100, by the simulator's cost model (`fig19_micro.py`)

End to end: requests with ShareGPT's lengths, cut, all there at the start, in a pool with room for a
share of them, so that running requests are preempted, in each mode and at each block size; and in a
pool with room for all ("none"). Outputs must be the same. Prefix caching is off, as in the paper's
system; with --enable_prefix_caching a preempted request may find its own blocks again.

Expect some minutes with --quick and an hour or so without on two CPU cores. --out_dir gets
results.json, results.csv (micro), end_to_end.csv and preemption.png.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from experiments.lib import figures
from experiments.lib.claims import Claim, Results, Rule, above, at_most, claim
from experiments.lib.driver import serve
from experiments.lib.experiment import grid, run
from experiments.lib.options import Options, engine_option, engine_options, option
from experiments.lib.reporting import print_rows, write_csv, write_results
from experiments.lib.serving_figures import complete_outputs, run_figures, shortfalls
from experiments.paper import fig19_micro as micro
from paged_jax import Engine, SamplingParams
from paged_jax.loading import LoadedModel, load_model
from paged_jax.workloads import VocabRange, WorkloadRequest, build_workload

RUNS = ("micro", "end_to_end")
WAYS = {"a copy for each block": "each", "swap": "swap", "recompute": "recompute"}
MIDDLE_BLOCKS = 16, 64  # between these block sizes, swapping and recomputing are about even
MOST_OVER_SWAP = 1.2  # recompute / swap, the paper's bound

MODES = ("none", "recompute", "swap", "auto")  # none: a pool in which everything fits

Row = dict[str, Any]
Outputs = list[list[int]]  # the tokens of each request
Served = tuple[Row, Outputs]

# Columns of the tables
MEASURED = ("block_size", "blocks", "out_ms", "in_ms", "swap_ms", "each_ms", "recompute_ms")
MODELLED = ("block_size", "a100_copies", "a100_each_ms", "a100_swap_ms", "a100_recompute_ms")
SERVED = ("block_size", "mode", "output_per_s", "latency_ms", "swap_percent", "same_percent")
COUNTED = ("block_size", "mode", "preemptions", "by_swap", "swapped_blocks", "recomputed_tokens")


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    runs: tuple[str, ...] = option(RUNS, "The runs to make.", choices=RUNS)
    num_tokens: int = option(512, "Tokens of the sequence.", quick=256, least=1)
    block_sizes: tuple[int, ...] = option(
        tuple(2**i for i in range(9)), "Micro: slots of a block.", quick=(1, 16, 256), least=1
    )
    rounds: int = option(7, "Micro: number of measurements.", quick=3, least=1)
    served_block_sizes: tuple[int, ...] = option(
        (4, 16, 64), "End to end: slots of a block.", quick=(16,), least=1
    )
    served_rounds: int = option(3, "End to end: rounds of all modes.", quick=2, least=1)
    num_requests: int = option(24, "End to end: number of requests.", quick=12, least=1)
    max_tokens: int = option(256, "End to end: outputs are cut to this.", quick=128, least=1)
    pool_percent: int = option(25, "Size of the pool, in percent of what requests fill.", least=1)
    max_model_len: int = engine_option("max_model_len", 512)
    max_num_seqs: int = engine_option("max_num_seqs", 16)
    max_num_batched_tokens: int = engine_option("max_num_batched_tokens", 128)
    enable_prefix_caching: bool = engine_option("enable_prefix_caching", False)
    model: str = option("smollm2", "Name or path of the model.")


@dataclass(frozen=True)
class Preemption:
    """A model whose sequences are preempted, one alone or many under load, at a block size."""

    config: Config
    model: LoadedModel

    def measure(self, block_size: int) -> Row:
        """Take one sequence out of the cache and bring it back."""
        rounds, seed = self.config.rounds, self.config.seed
        tokens = self.config.num_tokens
        return micro.measure(self.model, tokens, block_size, rounds=rounds, seed=seed)

    def serve(self, block_size: int) -> list[Row]:
        """Serve the requests in each mode in turn, round by round."""
        config, model = self.config, self.model
        requests, notes = build_workload(
            "lengths",
            lengths="sharegpt",
            num_requests=config.num_requests,
            max_model_len=config.max_model_len,
            max_tokens=config.max_tokens,
            overflow="clip",
            vocab=VocabRange(0, model.config.vocab_size),
            seed=config.seed,
        )
        print(f"block size {block_size}", *notes, sep="\n")
        blocks = [-(-(r.num_prompt_tokens + r.max_tokens - 1) // block_size) for r in requests]
        small = max(max(blocks), sum(blocks) * config.pool_percent // 100)
        options = engine_options(config) | {"block_size": block_size}
        served: dict[str, list[Served]] = {mode: [] for mode in MODES}
        engines = {}
        with ExitStack() as stack:
            for mode in MODES:
                engine = Engine(
                    model,
                    num_blocks=sum(blocks) if mode == "none" else small,
                    preemption_mode="recompute" if mode == "none" else mode,
                    swap_space_blocks=sum(blocks) if mode in ("swap", "auto") else 0,
                    **options,
                )
                engines[mode] = stack.enter_context(closing(engine))
                engine.warm_up()
            for number in range(config.served_rounds):
                # A noisy machine slows all of them.
                for mode in MODES if number % 2 == 0 else MODES[::-1]:
                    served[mode].append(serve_once(engines[mode], requests))
        _, wanted = served["none"][0]
        return [
            {"block_size": block_size, "mode": mode} | over_rounds(served[mode], wanted)
            for mode in MODES
        ]


def serve_once(engine: Engine, requests: Sequence[WorkloadRequest]) -> Served:
    """Serve requests that are all there at the start, greedily; counts are the engine's so far."""
    served = serve(engine, requests, SamplingParams(temperature=0))
    outputs = complete_outputs(served)
    if len(outputs) < len(requests):
        raise ValueError(shortfalls(served.served)[0]["why"])
    found = run_figures(served, engine, served.start_s)
    row = {
        "output_per_s": found["output_tokens_per_s"],
        "latency_ms": 1e3 * found["normalised_latency_s"]["mean"],  # arrival to the end, by token
        "preemptions": found["preemptions"],
        "by_swap": found["preemptions_by_swap"],
        "swapped_blocks": found["swapped_out_blocks"] + found["swapped_in_blocks"],
        "recomputed_tokens": found["recomputed_tokens"],
        "swap_percent": 100 * found["swap_s"] / sum(step.wall_s for step in served.steps),
    }
    return row, [output.outputs[0].token_ids for output in outputs]


def over_rounds(rounds: Sequence[Served], wanted: Outputs) -> Row:
    """Medians over a mode's rounds, counts of its first, and how many outputs are as `wanted`."""
    rows = [row for row, _ in rounds]
    timed = ("output_per_s", "latency_ms", "swap_percent")
    medians = {name: float(np.median([row[name] for row in rows])) for name in timed}
    same = [a == b for _, tokens in rounds for a, b in zip(tokens, wanted, strict=True)]
    return rows[0] | medians | {"same_percent": 100 * sum(same) / len(same)}


def compare(rows: Sequence[Row], served_rows: Sequence[Row]) -> Iterator[Row]:
    """The paper's claims beside figures of both runs, measured and modelled.

    rows: by block size. a100: with a copy for each block and layer, as in the paper's system.
    """
    if rows:
        sizes = [row["block_size"] for row in rows]
        each, swap, recompute = (  # [measured or modelled, block size]
            np.array([[row[f"{kind}{name}_ms"] for row in rows] for kind in ("", "a100_")])
            for name in WAYS.values()
        )
        over_swap, small_large = recompute / each, f"block size {sizes[0]} / {sizes[-1]}"
        low, high = MIDDLE_BLOCKS
        small = "swapping is slow at small blocks: many small copies"
        flat = "recomputing takes the same at any block size"
        bound = "recomputing takes never more than 20 % longer than swapping"
        even = f"from {low} to {high} slots a block both are about even"
        for paper, figure, found in (
            (small, f"a copy for each block: {small_large}", each[:, 0] / each[:, -1]),
            ("likewise", f"blocks gathered first: {small_large}", swap[:, 0] / swap[:, -1]),
            (flat, "longest / shortest", recompute.max(axis=1) / recompute.min(axis=1)),
            (bound, f"recompute / swap, the most (paper: {MOST_OVER_SWAP})", over_swap.max(axis=1)),
            *(
                (even, f"recompute / swap, block size {size}", over_swap[:, i])
                for i, size in enumerate(sizes)
                if low <= size <= high
            ),
        ):
            measured, a100 = found.tolist()
            yield {"paper": paper, "figure": figure, "measured": measured, "a100": a100}
    latency_ms = {(row["block_size"], row["mode"]): row["latency_ms"] for row in served_rows}
    for size in dict.fromkeys(size for size, _ in latency_ms):
        yield {
            "paper": "both are about even, end to end",
            "figure": f"latency, recompute / swap, block size {size}",
            "measured": latency_ms[size, "recompute"] / latency_ms[size, "swap"],
            "a100": None,
        }


def plot(config: Config, rows: Sequence[Row], served_rows: Sequence[Row]) -> None:
    """Costs against block size, measured and modelled; latencies end to end."""
    figure, axes = figures.panels(1, 3, size=(4.7, 4))
    measured, modelled, served = axes[0]
    sizes = [row["block_size"] for row in rows]
    for panel, kind in ((measured, ""), (modelled, "a100_")):
        for label, name in WAYS.items():
            figures.lines(panel, {label: [(r["block_size"], r[f"{kind}{name}_ms"]) for r in rows]})
        panel.set(xscale="log", yscale="log", xlabel="block size (slots)")
        panel.set_ylabel("out and in again, or prefill (ms)")
        panel.set_xticks(sizes, map(str, sizes))
        panel.minorticks_off()
    measured.set_title(f"measured: {config.model}")
    modelled.set_title("modelled: OPT-13B on an A100")
    served_sizes = [str(size) for size in dict.fromkeys(row["block_size"] for row in served_rows)]
    latencies = {
        mode: [row["latency_ms"] for row in served_rows if row["mode"] == mode] for mode in MODES
    }
    figures.bars(served, served_sizes, latencies)
    served.set(title="end to end", xlabel="block size (slots)")
    served.set_ylabel("normalised latency (ms/token)")
    for panel in axes[0]:
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    figures.save(figure, config.out_dir, "preemption.png")


def main(config: Config) -> None:
    preemption = Preemption(config, load_model(config.model))
    rows: list[Row] = []
    served_rows: list[Row] = []
    if "micro" in config.runs:
        sizes = sorted({*config.block_sizes})
        rows = grid(preemption.measure, sizes, config, unit="block size", description="micro")
        print_rows("Measured: one sequence, taken out and brought back", rows, MEASURED)
        print_rows("Modelled: OPT-13B on an A100", rows, MODELLED)
    if "end_to_end" in config.runs:
        sizes = sorted({*config.served_block_sizes})
        served = grid(preemption.serve, sizes, config, unit="block size", description="end to end")
        served_rows = [row for of_size in served for row in of_size]
        print_rows("End to end", served_rows, SERVED)
        print_rows("End to end, a round", served_rows, COUNTED)
    comparisons = list(compare(rows, served_rows))
    print_rows("The paper's claims (a100: modelled)", comparisons)
    write_results(rows, config, a100=micro.COST, end_to_end=served_rows, claims=comparisons)
    write_csv(config.out_dir, "end_to_end.csv", served_rows)
    plot(config, rows, served_rows)


def claims(results: Results) -> Iterator[Claim]:
    """The A100 is modelled by the experiment; on a CPU, host memory is as near as the cache."""
    rows = sorted(results["cases"], key=itemgetter("block_size"))
    if len(rows) < 2:
        return
    first, last = rows[0], rows[-1]
    slow = first["a100_each_ms"] / last["a100_each_ms"]
    yield claim(
        "swapping is slow at small blocks",
        paper="many small copies",
        found=slow,
        ours=f"{slow:.3g} times as long at {first['block_size']} as at {last['block_size']} "
        "(A100, modelled)",
        rule=above(2, " times"),
    )
    measured = [row["recompute_ms"] for row in rows]
    flat = max(measured) / min(measured)
    yield claim(
        "recomputing takes the same at any block size",
        paper="flat",
        found=flat,
        ours=f"longest over shortest: {flat:.2f} (measured)",
        rule=at_most(1.2),
        note="small blocks cost this device's attention more, and its timings vary",
    )
    ratios = {row["block_size"]: row["a100_recompute_ms"] / row["a100_each_ms"] for row in rows}
    most = max(ratios.values())
    yield claim(
        "recomputing takes never more than 20 % longer than swapping",
        paper=f"at most {MOST_OVER_SWAP}",
        found=most,
        ours=f"{most:.2f} at most (A100, modelled)",
        rule=at_most(MOST_OVER_SWAP),
        note="the model's PCIe and FLOP/s decide the largest blocks, where copies are few",
    )
    low, high = MIDDLE_BLOCKS
    if middle := {size: ratio for size, ratio in ratios.items() if low <= size <= high}:
        yield claim(
            f"from {low} to {high} slots a block both take about as long",
            paper="about even",
            found=middle.values(),
            ours=", ".join(f"{ratio:.2f} at {size}" for size, ratio in middle.items())
            + " (recompute over swap, A100, modelled)",
            rule=Rule("between 1/2 and 2", lambda found: all(0.5 <= each <= 2 for each in found)),
            note="a copy's fixed cost is assumed",
        )


if __name__ == "__main__":
    run(main, Config)
