"""What preemption costs, by recomputing tokens or by swapping blocks to host memory (Figure 19).

    python -m experiments.paper.fig19_preemption --quick
    python -m experiments.paper.fig19_preemption
    python -m experiments.paper.fig19_preemption --runs=micro --num_tokens=1024 --block_sizes=1,4,16,64,256

Micro: one sequence of --num_tokens is taken out of the cache and brought back, for each block size:

    measured   its blocks are copied to a pool in host memory and back, many blocks a step as the
               engine does it, and one block a step, as the paper's system issued a copy for each;
               or its tokens are prefilled. On a CPU both pools lie in host memory, so that copies
               cost much less than over PCIe, and computing much more than on a GPU.
    A100       the same for OPT-13B on an A100, by the simulator's cost model: see
               `preempting/modelled.py`. Nothing of it is measured.

End to end: requests with ShareGPT's lengths, cut, all there at the start, in a pool with room for
a share of them, so that running requests are preempted, in each mode and at each block size; and in
a pool with room for all ("none"). Outputs must be the same. Prefix caching is off, as in the
paper's system; with it on (--enable_prefix_caching) a preempted request may find its own blocks
again.

Expect some minutes with --quick and an hour or so without on two CPU cores. --out_dir gets
results.json, results.csv (micro), end_to_end.csv and preemption.png.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
from absl import flags
from matplotlib.axes import Axes
from tqdm import tqdm

from experiments.lib import reporting
from experiments.lib.reporting import preset
from experiments.paper import preemption_micro as modelled
from experiments.paper.preemption_end_to_end import (
    MODES,
    Mode,
    Run,
    Served,
    num_blocks_of,
    serve_once,
    summarise,
)
from experiments.paper.preemption_micro import Measured, measure
from paged_jax import Engine
from paged_jax.loading import LoadedModel, load_model
from paged_jax.workloads import VocabRange, WorkloadRequest, build_workload

_QUICK = flags.DEFINE_bool("quick", False, "Fewer block sizes, tokens, requests and rounds.")
_RUNS = flags.DEFINE_list("runs", ["micro", "end_to_end"], "micro, end_to_end or both.")
_NUM_TOKENS = flags.DEFINE_integer(
    "num_tokens", None, "Of the sequence; default: 512, or 256 with --quick.", lower_bound=1
)
_BLOCK_SIZES = flags.DEFINE_list(
    "block_sizes",
    None,
    "Slots (tokens) of a block; default: powers of two from 1 to 256, or 1,16,256 with --quick.",
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", None, "Of each measurement; default: 7, or 3 with --quick.", lower_bound=1
)
_SERVED_BLOCK_SIZES = flags.DEFINE_list(
    "served_block_sizes", None, "Likewise, end to end; default: 4,16,64, or 16 with --quick."
)
_SERVED_ROUNDS = flags.DEFINE_integer(
    "served_rounds", None, "Likewise, end to end; default: 3, or 2 with --quick.", lower_bound=1
)
_NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests", None, "End to end; default: 24, or 12 with --quick.", lower_bound=1
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Cut outputs to so many; default: 256, or 128 with --quick.", lower_bound=1
)
_POOL_PERCENT = flags.DEFINE_integer(
    "pool_percent", 25, "Room for so much of what all requests come to hold.", lower_bound=1
)
_MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len", 512, "Longest prompt and output together; longer requests are cut."
)
_MAX_NUM_SEQS = flags.DEFINE_integer("max_num_seqs", 16, "Sequences that run at a time.")
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens", 128, "Tokens of an iteration, end to end."
)
_ENABLE_PREFIX_CACHING = flags.DEFINE_bool(
    "enable_prefix_caching", False, "Whether preempted requests may find their blocks again."
)
_MODEL = flags.DEFINE_string("model", "smollm2", "The model's name or path.")
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths and tokens.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/preemption", "Where the results go.")

MIDDLE_BLOCKS = 16, 64
MOST_OVER_SWAP = 1.2  # recompute / swap, the paper's bound


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


class Claim(NamedTuple):
    """What the paper says of Figure 19, and the same figure here."""

    paper: str
    figure: str
    measured: float | None
    a100: float | None  # modelled, a copy for each block and layer as in the paper's system


def case_of(block_size: int, num_tokens: int, measured: Measured) -> Case:
    return Case(
        block_size,
        -(-num_tokens // block_size),
        measured.out_ms,
        measured.in_ms,
        measured.out_ms + measured.in_ms,
        measured.each_ms,
        measured.recompute_ms,
        modelled.num_copies(num_tokens, block_size),
        1e3 * modelled.swap_s(num_tokens, block_size),
        1e3 * modelled.gathered_swap_s(num_tokens, block_size),
        1e3 * modelled.recompute_s(num_tokens, block_size),
    )


def claims_of(cases: Sequence[Case], runs: Sequence[Run]) -> list[Claim]:
    """The paper's claims, each with the figure that tells whether it holds."""
    claims = []
    if cases:
        first, last = cases[0], cases[-1]
        recomputes = [case.recompute_ms for case in cases]
        a100_recomputes = [case.a100_recompute_ms for case in cases]
        ratios = [case.a100_recompute_ms / case.a100_each_ms for case in cases]
        claims += [
            Claim(
                "swapping is slow at small blocks: many small copies",
                f"a copy for each block: block size {first.block_size} / {last.block_size}",
                first.each_ms / last.each_ms,
                first.a100_each_ms / last.a100_each_ms,
            ),
            Claim(
                "likewise",
                f"blocks gathered first: block size {first.block_size} / {last.block_size}",
                first.swap_ms / last.swap_ms,
                first.a100_swap_ms / last.a100_swap_ms,
            ),
            Claim(
                "recomputing takes the same at any block size",
                "longest / shortest",
                max(recomputes) / min(recomputes),
                max(a100_recomputes) / min(a100_recomputes),
            ),
            Claim(
                "recomputing takes never more than 20 % longer than swapping",
                f"recompute / swap, the most (paper: {MOST_OVER_SWAP})",
                max(case.recompute_ms / case.each_ms for case in cases),
                max(ratios),
            ),
        ]
        low, high = MIDDLE_BLOCKS
        claims += [
            Claim(
                f"from {low} to {high} slots a block both are about even",
                f"recompute / swap, block size {case.block_size}",
                case.recompute_ms / case.each_ms,
                case.a100_recompute_ms / case.a100_each_ms,
            )
            for case in cases
            if low <= case.block_size <= high
        ]
    for block_size in dict.fromkeys(run.block_size for run in runs):
        by_mode = {run.mode: run for run in runs if run.block_size == block_size}
        ratio = by_mode["recompute"].latency_ms / by_mode["swap"].latency_ms
        figure = f"latency, recompute / swap, block size {block_size}"
        claims.append(Claim("both are about even, end to end", figure, ratio, None))
    return claims


def run_micro(model: LoadedModel, block_sizes: Sequence[int]) -> list[Case]:
    is_quick = _QUICK.value
    num_tokens = preset(_NUM_TOKENS, is_quick, quick=256, full=512)
    rounds = preset(_ROUNDS, is_quick, quick=3, full=7)
    cases = []
    with tqdm(total=rounds * len(block_sizes), desc="micro", unit="round", leave=False) as bar:
        for block_size in block_sizes:
            measured = measure(
                model,
                num_tokens,
                block_size,
                rounds=rounds,
                seed=_SEED.value,
                on_round=bar.update,
            )
            cases.append(case_of(block_size, num_tokens, measured))
    return cases


def draw_requests(model: LoadedModel) -> list[WorkloadRequest]:
    requests, notes = build_workload(
        "lengths",
        lengths="sharegpt",
        num_requests=preset(_NUM_REQUESTS, _QUICK.value, quick=12, full=24),
        max_model_len=_MAX_MODEL_LEN.value,
        max_tokens=preset(_MAX_TOKENS, _QUICK.value, quick=128, full=256),
        overflow="clip",
        vocab=VocabRange(0, model.config.vocab_size),
        seed=_SEED.value,
    )
    for note in notes:
        print(note)
    return requests


def run_end_to_end(
    model: LoadedModel, requests: Sequence[WorkloadRequest], block_size: int
) -> list[Run]:
    """Serve the requests in each mode in turn, round by round."""
    blocks = num_blocks_of(requests, block_size)
    small = max(max(blocks), sum(blocks) * _POOL_PERCENT.value // 100)
    engines: dict[Mode, Engine] = {}
    rounds: dict[Mode, list[Served]] = {mode: [] for mode in MODES}
    try:
        for mode in MODES:
            engines[mode] = Engine(
                model,
                block_size=block_size,
                num_blocks=sum(blocks) if mode == "none" else small,
                max_num_seqs=_MAX_NUM_SEQS.value,
                max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS.value,
                max_model_len=_MAX_MODEL_LEN.value,
                enable_prefix_caching=_ENABLE_PREFIX_CACHING.value,
                preemption_mode="recompute" if mode == "none" else mode,
                swap_space_blocks=sum(blocks) if mode in ("swap", "auto") else 0,
                seed=_SEED.value,
            )
            engines[mode].warm_up()
        for number in range(preset(_SERVED_ROUNDS, _QUICK.value, quick=2, full=3)):
            order = MODES if number % 2 == 0 else MODES[::-1]  # a noisy machine slows all of them
            for mode in order:
                print(f"block size {block_size}, {mode}, round {number + 1}")
                rounds[mode].append(serve_once(engines[mode], requests))
    finally:
        for engine in engines.values():
            engine.close()
    wanted = rounds["none"][0].tokens
    return [summarise(block_size, mode, rounds[mode], wanted) for mode in MODES]


def print_columns(title: str, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    if rows:
        reporting.print_table(title, columns, [[row[name] for name in columns] for row in rows])


def plot(cases: Sequence[Case], runs: Sequence[Run], path: str) -> None:
    """Costs against block size, measured and modelled; latencies end to end."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    lines = (("a copy for each block", "each"), ("swap", "swap"), ("recompute", "recompute"))
    for ax, prefix, title in (
        (axes[0], "", f"measured: {_MODEL.value}"),
        (axes[1], "a100_", "modelled: OPT-13B on an A100"),
    ):
        for label, name in lines:
            points = [(case.block_size, getattr(case, f"{prefix}{name}_ms")) for case in cases]
            if points:
                ax.loglog(*zip(*points, strict=True), "o-", label=label)
        ax.set_xticks([case.block_size for case in cases], [str(c.block_size) for c in cases])
        ax.minorticks_off()
        _label(ax, title, "block size (slots)", "out and in again, or prefill (ms)")
    sizes = list(dict.fromkeys(run.block_size for run in runs))
    for number, mode in enumerate(MODES):
        heights = [run.latency_ms for run in runs if run.mode == mode]
        places = [i + 0.2 * (number - 1.5) for i in range(len(heights))]
        axes[2].bar(places, heights, width=0.18, label=mode)
    axes[2].set_xticks(range(len(sizes)), [str(size) for size in sizes])
    _label(axes[2], "end to end", "block size (slots)", "normalised latency (ms/token)")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def block_sizes_of(flag: flags.FlagHolder[list[str] | None], default: list[int]) -> list[int]:
    """Ascending, each once."""
    if flag.value is None:
        return default
    return sorted({*reporting.integers(flag, 1)})


def main() -> None:
    known = {"micro", "end_to_end"}
    if not _RUNS.value or set(_RUNS.value) - known:
        raise ValueError(f"--runs takes micro and end_to_end, got {','.join(_RUNS.value)}")
    is_quick = _QUICK.value
    powers = [2**i for i in range(9)]
    micro_sizes = block_sizes_of(_BLOCK_SIZES, [1, 16, 256] if is_quick else powers)
    served_sizes = block_sizes_of(_SERVED_BLOCK_SIZES, [16] if is_quick else [4, 16, 64])
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    model = load_model(_MODEL.value)
    cases = run_micro(model, micro_sizes) if "micro" in _RUNS.value else []
    runs: list[Run] = []
    if "end_to_end" in _RUNS.value:
        requests = draw_requests(model)
        for block_size in served_sizes:
            runs += run_end_to_end(model, requests, block_size)

    claims = claims_of(cases, runs)
    rows = [case._asdict() for case in cases]
    served = [run._asdict() for run in runs]
    tables = {"end_to_end": served, "claims": [claim._asdict() for claim in claims]}
    reporting.write_cases(rows, out_dir, _QUICK, a100=modelled.COST, **tables)
    reporting.write_csv(out_dir, "end_to_end.csv", served)
    print_columns("Measured: one sequence, taken out and brought back", rows, Case._fields[:7])
    print_columns("Modelled: OPT-13B on an A100", rows, ("block_size", *Case._fields[7:]))
    print_columns("End to end", served, (*Run._fields[:4], *Run._fields[8:]))
    print_columns("End to end, a round", served, ("block_size", "mode", *Run._fields[4:8]))
    reporting.print_table("The paper's claims (a100: modelled)", Claim._fields, claims)
    plot(cases, runs, str(out_dir / "preemption.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
