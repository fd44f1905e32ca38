"""How much KV memory parallel sampling and beam search save by sharing blocks (Figure 15).

    python -m experiments.paper.fig15_memory_sharing --quick
    python -m experiments.paper.fig15_memory_sharing
    python -m experiments.paper.fig15_memory_sharing --runs=simulated --widths=2,8,16 --block_size=8

Saved are blocks that sharing makes unnecessary, as a share of those that would be held without it
(Kwon et al., section 6.3), over all iterations of a run. Requests have ShareGPT's and Alpaca's
mean lengths, outputs of exactly the length drawn, and share nothing with each other. Three runs:

    real       SmolLM2 over the beginnings of ShareGPT conversations
    likewise   the same requests without the model: scheduler and memory manager alone, random
               samples, and beams whose next tokens are drawn as in
               `paged_jax/simulation/branching.py`
    opt_13b    the same with more requests in the memory that the paper had for OPT-13B

For parallel samples the first two must agree, as lengths alone decide. For beams the difference
tells how like a model's the drawn tokens are; a second table compares for how many tokens beams
have been apart.

Expect minutes with --quick, which takes few requests and cuts their outputs in the real run (the
prompt then weighs more, and so does what it saves), and half an hour or so without on two CPU
cores. --out_dir gets results.json, results.csv and memory_sharing.png.
"""

from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from absl import flags

from experiments.lib import reporting
from experiments.lib.driver import require_fitting, serve
from experiments.lib.reporting import preset
from experiments.paper.sharing_savings import (
    BeamObserver,
    BranchingExecutor,
    saved_fraction,
    simulate,
    with_sharegpt_text,
)
from paged_jax import Engine, SamplingParams
from paged_jax.simulation.executor import VOCAB_SIZE
from paged_jax.simulation.run import SystemConfig
from paged_jax.workloads import PUBLISHED_LENGTHS, VocabRange, WorkloadRequest, build_workload

_QUICK = flags.DEFINE_bool("quick", False, "Few requests, short outputs in the real run.")
_RUNS = flags.DEFINE_list("runs", ["real", "simulated"], "real, simulated or both.")
_LENGTHS = flags.DEFINE_list("lengths", list(PUBLISHED_LENGTHS), "Whose lengths requests have.")
_WIDTHS = flags.DEFINE_list("widths", ["2", "4", "6"], "Samples or beams of a request.")
_NUM_REAL_REQUESTS = flags.DEFINE_integer(
    "num_real_requests", None, "Requests to SmolLM2; default: 12, or 4 with --quick.", lower_bound=1
)
_MAX_REAL_TOKENS = flags.DEFINE_integer(
    "max_real_tokens",
    None,
    "Cut the outputs of the real run to so many tokens; default: 0, not at all, or 96 with "
    "--quick.",
    lower_bound=0,
)
_NUM_REQUESTS = flags.DEFINE_integer(
    "num_requests",
    None,
    "Requests at OPT-13B's scale; default: 1000, or 300 with --quick.",
    lower_bound=1,
)
_MODEL = flags.DEFINE_string("model", "smollm2", "The real model's name or path.")
_TRACE = flags.DEFINE_string("trace", None, "A ShareGPT file; default: the installed package.")
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "Slots (tokens) of a KV block.", lower_bound=1)
_NUM_SLOTS = flags.DEFINE_integer(
    "num_slots", 15_700, "KV slots (tokens) at OPT-13B's scale.", lower_bound=1
)
_MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len", 2048, "Longest prompt and output together; longer requests are left out."
)
_MAX_NUM_SEQS = flags.DEFINE_integer(
    "max_num_seqs", 24, "Sequences of the real run at a time.", lower_bound=1
)
_MAX_NUM_BATCHED_TOKENS = flags.DEFINE_integer(
    "max_num_batched_tokens",
    None,
    "Tokens of an iteration of the real run; default: 256 on a CPU, 4096 on a GPU.",
)
_SEED = flags.DEFINE_integer("seed", 0, "Of lengths, texts and samples.", lower_bound=0)
_OUT_DIR = flags.DEFINE_string("out_dir", "out/memory_sharing", "Where the results go.")

METHODS = ("parallel", "beam")
PAPER_PERCENT = {
    ("alpaca", "parallel", 2): "6.1",
    ("alpaca", "parallel", 4): "8.5",
    ("alpaca", "parallel", 6): "9.8",
    ("alpaca", "beam", 2): "37.6",
    ("alpaca", "beam", 4): "53.1",
    ("alpaca", "beam", 6): "55.2",
}
PAPER_RANGES = {("sharegpt", "parallel"): (16.2, 30.5), ("sharegpt", "beam"): (44.3, 66.3)}
PAPER_WIDTHS = (2, 4, 6)


class Case(NamedTuple):
    """Saved blocks in percent of those without sharing; None where a run was left out."""

    lengths: str
    method: str
    width: int
    real: float | None
    likewise: float | None  # simulated, the requests of the real run
    opt_13b: float | None  # simulated
    paper: str | None


class Apart(NamedTuple):
    """For how many tokens all beams of a search have been apart, over its steps."""

    lengths: str
    width: int
    run: str
    mean: float | None
    p50: float | None
    p90: float | None


def params_of(method: str, width: int) -> SamplingParams:
    if method == "parallel":
        return SamplingParams(n=width, temperature=1.0)
    return SamplingParams(beam_width=width, temperature=0)


def paper_percent(lengths: str, method: str, width: int) -> str | None:
    if width in PAPER_WIDTHS and (lengths, method) in PAPER_RANGES:
        low, high = PAPER_RANGES[lengths, method]
        return f"{low} to {high}"
    return PAPER_PERCENT.get((lengths, method, width))


def draw_requests(
    lengths: str, count: int, max_tokens: int | None, vocab_size: int
) -> list[WorkloadRequest]:
    """Requests of random tokens; what is longer than the limit is left out."""
    requests, notes = build_workload(
        "lengths",
        lengths=lengths,
        num_requests=count,
        max_model_len=_MAX_MODEL_LEN.value,
        max_tokens=max_tokens,
        vocab=VocabRange(0, vocab_size),
        seed=_SEED.value,
    )
    for note in notes:
        print(note)
    return requests


class RealRuns:
    """One engine, and beside it the same limits without a model."""

    def __init__(self, max_tokens: int | None, num_requests: int):
        self._engine = engine = Engine(
            _MODEL.value,
            block_size=_BLOCK_SIZE.value,
            max_num_seqs=_MAX_NUM_SEQS.value,
            max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS.value,
            max_model_len=_MAX_MODEL_LEN.value,
            enable_prefix_caching=False,  # requests share nothing with each other
            seed=_SEED.value,
        )
        self._observer = engine.core.executor = BeamObserver(engine.executor)
        self._system = SystemConfig(
            num_slots=engine.num_blocks * engine.block_size,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
        )
        self._requests: dict[str, list[WorkloadRequest]] = {}
        for lengths in _LENGTHS.value:
            drawn = draw_requests(lengths, num_requests, max_tokens, engine.config.vocab_size)
            self._requests[lengths] = with_sharegpt_text(
                drawn,
                lambda text: engine.tokenizer.encode(text, verbose=False),
                trace=_TRACE.value,
                seed=_SEED.value,
            )
            require_fitting(engine, self._requests[lengths])
        engine.warm_up()

    def facts(self) -> dict[str, Any]:
        return {name: length_facts(requests) for name, requests in self._requests.items()}

    def run(self, lengths: str, method: str, width: int) -> tuple[float, float, list[Apart]]:
        """Saved percent of the real and of the simulated run, and how far beams were apart."""
        requests, params = self._requests[lengths], params_of(method, width)
        print(f"{lengths}, {method} {width}: {len(requests)} requests to {_MODEL.value}")
        run = serve(self._engine, requests, params)
        if refused := [served.refusal for served in run.served if served.refusal]:
            raise ValueError(refused[0])
        real_apart = self._observer.take()

        observers: list[BeamObserver] = []

        def executor_of(memory: Any) -> BeamObserver:
            observers.append(BeamObserver(BranchingExecutor(memory, seed=_SEED.value)))
            return observers[-1]

        usages = simulate(requests, params, self._system, executor_of, description="likewise")
        apart = [
            Apart(lengths, width, name, *spread.values())
            for name, spread in (("real", real_apart), ("likewise", observers[0].take()))
            if method == "beam"
        ]
        real_fraction = saved_fraction(step.usage for step in run.steps)
        return 100 * real_fraction, 100 * saved_fraction(usages), apart

    def close(self) -> None:
        self._engine.close()


def run_opt_13b(
    requests: list[WorkloadRequest], method: str, width: int, description: str
) -> float:
    """Saved percent with as many KV slots as the paper had for OPT-13B on an A100."""
    system = SystemConfig(
        num_slots=_NUM_SLOTS.value,
        block_size=_BLOCK_SIZE.value,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
        max_model_len=_MAX_MODEL_LEN.value,
    )
    usages = simulate(
        requests,
        params_of(method, width),
        system,
        lambda memory: BranchingExecutor(memory, seed=_SEED.value),
        description=description,
    )
    return 100 * saved_fraction(usages)


def length_facts(requests: list[WorkloadRequest]) -> dict[str, float]:
    return {
        "requests": len(requests),
        "mean_prompt_tokens": float(np.mean([r.num_prompt_tokens for r in requests])),
        "mean_output_tokens": float(np.mean([r.max_tokens for r in requests])),
    }


def plot(cases: list[Case], path: str) -> None:
    """Bars of each run, the paper's figures as black marks, or as bands where it gives ranges."""
    names = list(dict.fromkeys(case.lengths for case in cases))
    figure, all_axes = plt.subplots(
        1, len(names), figsize=(5.5 * len(names), 4), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    runs = ("real", "likewise", "opt_13b")
    for axes, name in zip(all_axes[0], names, strict=True):
        chosen = [case for case in cases if case.lengths == name]
        for number, run in enumerate(runs):
            percents = [(i, getattr(case, run)) for i, case in enumerate(chosen)]
            bars = [(i + 0.27 * (number - 1), x) for i, x in percents if x is not None]
            if bars:
                axes.bar(*zip(*bars, strict=True), width=0.25, label=run)
        for i, case in enumerate(chosen):
            if (name, case.method, case.width) in PAPER_PERCENT:
                axes.plot(i, float(case.paper or 0), "k_", markersize=24)
            elif case.paper is not None:
                low, high = PAPER_RANGES[name, case.method]
                axes.fill_between([i - 0.45, i + 0.45], low, high, color="0.85", zorder=0)
        axes.set_xticks(range(len(chosen)), [f"{case.method}\n{case.width}" for case in chosen])
        axes.set_title(name)
    all_axes[0][0].set_ylabel("blocks saved by sharing (%)")
    all_axes[0][0].legend(title="black, grey: the paper")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    widths = reporting.integers(_WIDTHS, 1)
    for flag, known in ((_RUNS, ("real", "simulated")), (_LENGTHS, tuple(PUBLISHED_LENGTHS))):
        if not flag.value or set(flag.value) - set(known):
            raise ValueError(
                f"--{flag.name} takes {' and '.join(known)}, got {','.join(flag.value)}"
            )
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    is_quick = _QUICK.value
    facts: dict[str, Any] = {}
    real: dict[tuple[str, str, int], tuple[float | None, float | None]] = {}
    apart: list[Apart] = []
    grid = [
        (lengths, method, width)
        for lengths in _LENGTHS.value
        for method in METHODS
        for width in widths
    ]
    if "real" in _RUNS.value:
        runs = RealRuns(
            preset(_MAX_REAL_TOKENS, is_quick, quick=96, full=0) or None,
            preset(_NUM_REAL_REQUESTS, is_quick, quick=4, full=12),
        )
        facts["real_requests"] = runs.facts()
        try:
            for key in grid:
                real_percent, likewise_percent, apart_of_key = runs.run(*key)
                real[key] = real_percent, likewise_percent
                apart += apart_of_key
        finally:
            runs.close()
    opt_13b: dict[tuple[str, str, int], float] = {}
    if "simulated" in _RUNS.value:
        count = preset(_NUM_REQUESTS, is_quick, quick=300, full=1000)
        drawn = {name: draw_requests(name, count, None, VOCAB_SIZE) for name in _LENGTHS.value}
        facts["opt_13b_requests"] = {name: length_facts(reqs) for name, reqs in drawn.items()}
        for lengths, method, width in grid:
            opt_13b[lengths, method, width] = run_opt_13b(
                drawn[lengths], method, width, f"opt_13b: {lengths}, {method} {width}"
            )

    nothing: tuple[float | None, float | None] = None, None
    cases = [
        Case(*key, *real.get(key, nothing), opt_13b.get(key), paper_percent(*key)) for key in grid
    ]
    rows = [case._asdict() for case in cases]
    reporting.report_cases(
        "Blocks saved by sharing (%)",
        rows,
        out_dir,
        _QUICK,
        **facts,
        tokens_apart=[row._asdict() for row in apart],
    )
    if apart:
        reporting.print_table("Tokens for which the beams have been apart", Apart._fields, apart)
    for run, by_lengths in facts.items():
        for name, values in by_lengths.items():
            mean_prompt, mean_output = values["mean_prompt_tokens"], values["mean_output_tokens"]
            print(
                f"{run}, {name}: {values['requests']}, on average {mean_prompt:.1f} prompt and "
                f"{mean_output:.1f} output tokens"
            )
    plot(cases, str(out_dir / "memory_sharing.png"))
    print(f"results in {out_dir}")


if __name__ == "__main__":
    reporting.run(main)
