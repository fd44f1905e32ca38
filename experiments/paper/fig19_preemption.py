"""What preemption costs, by recomputing tokens or by swapping blocks to host memory (Figure 19).

    python -m experiments.paper.fig19_preemption --quick
    python -m experiments.paper.fig19_preemption
    python -m experiments.paper.fig19_preemption --runs=micro --num_tokens=1024

Micro: one sequence of --num_tokens is taken out of the cache and brought back, for each block size:

    measured   its blocks are copied to a pool in host memory and back, many blocks a step as the
               engine does it, and one block a step, as the paper's system issued a copy for each;
               or its tokens are prefilled. On a CPU both pools lie in host memory, so that copies
               cost much less than over PCIe, and computing much more than on a GPU.
    A100       the same for OPT-13B on an A100, by the simulator's cost model: see
               `fig19_micro.py`. Nothing of it is measured.

End to end: requests with ShareGPT's lengths, cut, all there at the start, in a pool with room for
a share of them, so that running requests are preempted, in each mode and at each block size; and in
a pool with room for all ("none"). Outputs must be the same. Prefix caching is off, as in the
paper's system; with it on (--enable_prefix_caching) a preempted request may find its own blocks
again.

Expect some minutes with --quick and an hour or so without on two CPU cores. --out_dir gets
results.json, results.csv (micro), end_to_end.csv and preemption.png.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, truediv
from typing import Any, NamedTuple

from experiments.lib import figures
from experiments.lib.claims import Claim, Results, Rule, above, at_most, claim
from experiments.lib.experiment import grid, run
from experiments.lib.options import Options, engine_option, engine_options, option
from experiments.lib.reporting import print_table, write_csv, write_results
from experiments.paper import fig19_micro as micro
from experiments.paper.fig19_end_to_end import MODES, Run, serve_modes
from paged_jax.loading import load_model
from paged_jax.workloads import VocabRange, build_workload

MIDDLE_BLOCKS = 16, 64  # between these block sizes, swapping and recomputing are about even
MOST_OVER_SWAP = 1.2  # recompute / swap, the paper's bound

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    runs: tuple[str, ...] = option(
        ("micro", "end_to_end"), "These runs are made.", choices=("micro", "end_to_end")
    )
    num_tokens: int = option(512, "The sequence has so many tokens.", quick=256, least=1)
    block_sizes: tuple[int, ...] = option(
        tuple(2**i for i in range(9)),
        "The sequence lies in blocks of so many slots, one for each token.",
        quick=(1, 16, 256),
        least=1,
    )
    rounds: int = option(7, "Each measurement is made so many times.", quick=3, least=1)
    served_block_sizes: tuple[int, ...] = option(
        (4, 16, 64), "End to end, blocks have so many slots.", quick=(16,), least=1
    )
    served_rounds: int = option(
        3, "End to end, each mode serves the requests so many times.", quick=2, least=1
    )
    num_requests: int = option(24, "End to end, there are so many requests.", quick=12, least=1)
    max_tokens: int = option(
        256, "End to end, outputs are cut to so many tokens.", quick=128, least=1
    )
    pool_percent: int = option(
        25, "The pool's size, in percent of all the blocks that the requests come to hold.", least=1
    )
    max_model_len: int = engine_option("max_model_len", 512)
    max_num_seqs: int = engine_option("max_num_seqs", 16)
    max_num_batched_tokens: int = engine_option("max_num_batched_tokens", 128)
    enable_prefix_caching: bool = engine_option("enable_prefix_caching", False)
    model: str = option("smollm2", "The model has this name or path.")


class Case(NamedTuple):
    """One block size of the micro run. Swap is out and in; a100_… is modelled for OPT-13B."""

    block_size: int
    blocks: int
    out_ms: float
    in_ms: float
    swap_ms: float
    each_ms: float  # a step for each block
    recompute_ms: float
    a100_copies: int  # each way, if there is one for each block and layer
    a100_each_ms: float
    a100_swap_ms: float  # gathered before they are copied
    a100_recompute_ms: float


class Comparison(NamedTuple):
    """What the paper says of Figure 19, and the same figure here."""

    paper: str
    figure: str
    measured: float | None
    a100: float | None  # modelled, a copy for each block and layer as in the paper's system


class Preemption:
    """A model whose sequences are preempted, one alone or many under load, at a block size."""

    def __init__(self, config: Config):
        self._config, self._model = config, load_model(config.model)

    def measure(self, block_size: int) -> Case:
        """Take one sequence out of the cache and bring it back."""
        num_tokens, rounds, seed = self._config.num_tokens, self._config.rounds, self._config.seed
        out_ms, in_ms, each_ms, recompute_ms = micro.measure(
            self._model, num_tokens, block_size, rounds=rounds, seed=seed
        )
        return Case(
            block_size,
            -(-num_tokens // block_size),
            out_ms,
            in_ms,
            out_ms + in_ms,
            each_ms,
            recompute_ms,
            micro.num_copies(num_tokens, block_size),
            1e3 * micro.swap_s(num_tokens, block_size),
            1e3 * micro.gathered_swap_s(num_tokens, block_size),
            1e3 * micro.recompute_s(num_tokens, block_size),
        )

    def serve(self, block_size: int) -> list[Run]:
        """Serve the requests in each mode."""
        config = self._config
        requests, notes = build_workload(
            "lengths",
            lengths="sharegpt",
            num_requests=config.num_requests,
            max_model_len=config.max_model_len,
            max_tokens=config.max_tokens,
            overflow="clip",
            vocab=VocabRange(0, self._model.config.vocab_size),
            seed=config.seed,
        )
        print("\n".join([f"block size {block_size}", *notes]))
        return serve_modes(
            self._model,
            engine_options(config) | {"block_size": block_size},
            requests,
            pool_percent=config.pool_percent,
            rounds=config.served_rounds,
        )


def compare(rows: Rows) -> list[Comparison]:
    """The paper's claims, each with the figures that tell whether it holds.

    rows: the cases of the micro run, by block size.
    """
    sizes = [row["block_size"] for row in rows]
    both = [
        [[row[f"{kind}{name}_ms"] for row in rows] for name in ("each", "swap", "recompute")]
        for kind in ("", "a100_")
    ]
    low, high = MIDDLE_BLOCKS
    return [
        Comparison(
            "swapping is slow at small blocks: many small copies",
            f"a copy for each block: block size {sizes[0]} / {sizes[-1]}",
            *(each[0] / each[-1] for each, _, _ in both),
        ),
        Comparison(
            "likewise",
            f"blocks gathered first: block size {sizes[0]} / {sizes[-1]}",
            *(swap[0] / swap[-1] for _, swap, _ in both),
        ),
        Comparison(
            "recomputing takes the same at any block size",
            "longest / shortest",
            *(max(recompute) / min(recompute) for _, _, recompute in both),
        ),
        Comparison(
            "recomputing takes never more than 20 % longer than swapping",
            f"recompute / swap, the most (paper: {MOST_OVER_SWAP})",
            *(max(map(truediv, recompute, each)) for each, _, recompute in both),
        ),
        *(
            Comparison(
                f"from {low} to {high} slots a block both are about even",
                f"recompute / swap, block size {size}",
                *(recompute[i] / each[i] for each, _, recompute in both),
            )
            for i, size in enumerate(sizes)
            if low <= size <= high
        ),
    ]


def compare_served(runs: Sequence[Run]) -> list[Comparison]:
    """The paper's claim about runs end to end."""
    latency_ms = {(run.block_size, run.mode): run.latency_ms for run in runs}
    return [
        Comparison(
            "both are about even, end to end",
            f"latency, recompute / swap, block size {size}",
            latency_ms[size, "recompute"] / latency_ms[size, "swap"],
            None,
        )
        for size in dict.fromkeys(run.block_size for run in runs)
    ]


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


def plot(config: Config, rows: Rows, runs: Sequence[Run]) -> None:
    """Costs against block size, measured and modelled; latencies end to end."""
    figure, axes = figures.panels(1, 3, size=(4.7, 4))
    measured, modelled, served = axes[0]
    names = {"a copy for each block": "each", "swap": "swap", "recompute": "recompute"}
    for panel, prefix in ((measured, ""), (modelled, "a100_")):
        panel.set(xscale="log", yscale="log", xlabel="block size (slots)")
        panel.set_ylabel("out and in again, or prefill (ms)")
        times = {
            label: [(row["block_size"], row[f"{prefix}{name}_ms"]) for row in rows]
            for label, name in names.items()
        }
        figures.lines(panel, times)
        sizes = [row["block_size"] for row in rows]
        panel.set_xticks(sizes, map(str, sizes))
        panel.minorticks_off()
    measured.set_title(f"measured: {config.model}")
    modelled.set_title("modelled: OPT-13B on an A100")
    latencies = {mode: [r.latency_ms for r in runs if r.mode == mode] for mode in MODES}
    figures.bars(
        served, [str(size) for size in dict.fromkeys(r.block_size for r in runs)], latencies
    )
    served.set(
        title="end to end", xlabel="block size (slots)", ylabel="normalised latency (ms/token)"
    )
    for panel in axes[0]:
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    figures.save(figure, config.out_dir, "preemption.png")


def print_columns(title: str, rows: Rows, columns: Sequence[str]) -> None:
    if rows:
        print_table(title, columns, [[row[name] for name in columns] for row in rows])


def main(config: Config) -> None:
    preemption = Preemption(config)
    cases: list[Case] = []
    runs: list[Run] = []
    if "micro" in config.runs:
        sizes = sorted({*config.block_sizes})
        cases = grid(preemption.measure, sizes, config, unit="block size", description="micro")
    if "end_to_end" in config.runs:
        sizes = sorted({*config.served_block_sizes})
        served = grid(preemption.serve, sizes, config, unit="block size", description="end to end")
        runs = [row for of_size in served for row in of_size]

    rows, served_rows = [c._asdict() for c in cases], [r._asdict() for r in runs]
    comparisons = (compare(rows) if rows else []) + compare_served(runs)
    write_results(
        rows,
        config,
        a100=micro.COST,
        end_to_end=served_rows,
        claims=[each._asdict() for each in comparisons],
    )
    write_csv(config.out_dir, "end_to_end.csv", served_rows)
    print_columns("Measured: one sequence, taken out and brought back", rows, Case._fields[:7])
    print_columns("Modelled: OPT-13B on an A100", rows, ("block_size", *Case._fields[7:]))
    print_columns("End to end", served_rows, (*Run._fields[:4], *Run._fields[8:]))
    print_columns("End to end, a round", served_rows, ("block_size", "mode", *Run._fields[4:8]))
    print_table("The paper's claims (a100: modelled)", Comparison._fields, comparisons)
    plot(config, rows, runs)


if __name__ == "__main__":
    run(main, Config)
