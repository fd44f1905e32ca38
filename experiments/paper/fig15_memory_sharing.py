"""How much KV memory parallel sampling and beam search save by sharing blocks (Figure 15).

    python -m experiments.paper.fig15_memory_sharing --quick
    python -m experiments.paper.fig15_memory_sharing
    python -m experiments.paper.fig15_memory_sharing --runs=simulated --widths=2,8,16 --block_size=8

Saved are the blocks that sharing makes unnecessary, as a share of all blocks that would be held
without it (Kwon et al., section 6.3), over all iterations of a run. Requests have ShareGPT's and
Alpaca's mean lengths, outputs of exactly the length drawn, and share nothing with each other. There
are three runs:

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

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from experiments.lib import figures
from experiments.lib.claims import Claim, Results, claim, within_points
from experiments.lib.driver import require_fitting, serve
from experiments.lib.experiment import grid, run
from experiments.lib.fake_devices import BatchRecorder, BranchingDevice
from experiments.lib.options import SimulationOptions, engine_option, engine_options, option
from experiments.lib.reporting import print_table, report, spread
from experiments.paper.fig15_savings import (
    beams_apart,
    saved_fraction,
    simulate,
    with_sharegpt_text,
)
from paged_jax import Engine, SamplingParams
from paged_jax.simulation.branching import VOCAB_SIZE
from paged_jax.simulation.system import SystemConfig
from paged_jax.workloads import PUBLISHED_LENGTHS, VocabRange, WorkloadRequest, build_workload

METHODS = ("parallel", "beam")
WIDTHS = (2, 4, 6)
PAPER_PERCENT: dict[tuple[str, str, int], tuple[float, ...]] = {
    ("alpaca", "parallel", 2): (6.1,),
    ("alpaca", "parallel", 4): (8.5,),
    ("alpaca", "parallel", 6): (9.8,),
    ("alpaca", "beam", 2): (37.6,),
    ("alpaca", "beam", 4): (53.1,),
    ("alpaca", "beam", 6): (55.2,),
    # For ShareGPT the paper gives ranges over the widths.
    **{("sharegpt", "parallel", width): (16.2, 30.5) for width in WIDTHS},
    **{("sharegpt", "beam", width): (44.3, 66.3) for width in WIDTHS},
}


@dataclass(frozen=True, kw_only=True)
class Config(SimulationOptions):
    runs: tuple[str, ...] = option(
        ("real", "simulated"),
        "These runs are made: the real model, with its requests simulated beside it, and a "
        "simulation at OPT-13B's scale.",
        choices=("real", "simulated"),
    )
    lengths: tuple[str, ...] = option(
        tuple(PUBLISHED_LENGTHS), "Requests have these lengths.", choices=PUBLISHED_LENGTHS
    )
    widths: tuple[int, ...] = option(WIDTHS, "Requests have so many samples or beams.", least=1)
    num_real_requests: int = option(12, "The real model serves so many requests.", quick=4, least=1)
    max_real_tokens: int = option(
        0,
        "Outputs of the real run are cut to so many tokens; 0 leaves them whole.",
        quick=96,
        least=0,
    )
    num_requests: int = option(
        1000, "So many requests are served at OPT-13B's scale.", quick=300, least=1
    )
    model: str = option("smollm2", "The real model has this name or path.")
    trace: str | None = option(
        None, "Real prompts come from this ShareGPT file. By default it is the installed package's."
    )
    block_size: int = engine_option("block_size")
    num_slots: int = option(15_700, "OPT-13B has so many KV slots, one for each token.", least=1)
    max_model_len: int = engine_option("max_model_len", 2048)
    max_num_seqs: int = engine_option("max_num_seqs", 24)
    max_num_batched_tokens: int | None = engine_option("max_num_batched_tokens")


class Point(NamedTuple):
    """Requests of a kind of lengths, each with so many samples or beams."""

    lengths: str
    method: str
    width: int

    @property
    def params(self) -> SamplingParams:
        if self.method == "parallel":
            return SamplingParams(n=self.width, temperature=1.0)
        return SamplingParams(beam_width=self.width, temperature=0)


class Case(NamedTuple):
    """Saved blocks in percent of the blocks without sharing; None where a run was left out."""

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


RealRow = tuple[float | None, float | None, list[Apart]]  # percent: real, likewise


def draw_requests(
    config: Config, lengths: str, count: int, *, vocab_size: int, max_tokens: int | None = None
) -> list[WorkloadRequest]:
    """Requests of random tokens; requests longer than the limit are left out."""
    requests, notes = build_workload(
        "lengths",
        lengths=lengths,
        num_requests=count,
        max_model_len=config.max_model_len,
        max_tokens=max_tokens,
        vocab=VocabRange(0, vocab_size),
        seed=config.seed,
    )
    for note in notes:
        print(note)
    return requests


class RealRuns:
    """One engine, and beside it a system of the same limits without a model."""

    def __init__(self, engine: Engine, requests: dict[str, list[WorkloadRequest]], seed: int):
        self._engine, self._requests, self._seed = engine, requests, seed
        self._recorder = engine.core.executor = BatchRecorder(engine.executor, beams_apart)
        self._system = SystemConfig(
            num_slots=engine.num_blocks * engine.block_size,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
        )

    def measure(self, point: Point) -> RealRow:
        """Saved percent of the real and of the simulated run, and how far beams were apart."""
        requests = self._requests[point.lengths]
        run = serve(self._engine, requests, point.params)
        if refused := [served.refusal for served in run.served if served.refusal]:
            raise ValueError(refused[0])
        scheduler = self._system.scheduler()
        device = BranchingDevice(scheduler.memory, seed=self._seed)
        recorder = BatchRecorder(device, beams_apart)
        usages = simulate(requests, point.params, scheduler, recorder)
        apart = [
            Apart(point.lengths, point.width, name, *spread(of.take(), percents=(50, 90)).values())
            for name, of in (("real", self._recorder), ("likewise", recorder))
            if point.method == "beam"
        ]
        saved = saved_fraction(step.usage for step in run.steps), saved_fraction(usages)
        return 100 * saved[0], 100 * saved[1], apart


def real_requests(config: Config, engine: Engine, lengths: str) -> list[WorkloadRequest]:
    """Requests with prompts from ShareGPT; ValueError for one that the engine cannot hold."""
    count, most = config.num_real_requests, config.max_real_tokens or None
    vocab_size = engine.config.vocab_size
    requests = with_sharegpt_text(
        draw_requests(config, lengths, count, vocab_size=vocab_size, max_tokens=most),
        lambda text: engine.tokenizer.encode(text, verbose=False),
        trace=config.trace,
        seed=config.seed,
    )
    require_fitting(engine, requests)
    return requests


def measure_opt_13b(
    config: Config, requests: dict[str, list[WorkloadRequest]], point: Point
) -> float:
    """Saved percent with as many KV slots as the paper had for OPT-13B on an A100."""
    system = SystemConfig(
        num_slots=config.num_slots,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
    )
    scheduler = system.scheduler()
    executor = BranchingDevice(scheduler.memory, seed=config.seed)
    return 100 * saved_fraction(
        simulate(requests[point.lengths], point.params, scheduler, executor)
    )


def length_facts(requests: list[WorkloadRequest]) -> dict[str, float]:
    return {
        "requests": len(requests),
        "mean_prompt_tokens": float(np.mean([r.num_prompt_tokens for r in requests])),
        "mean_output_tokens": float(np.mean([r.max_tokens for r in requests])),
    }


def plot(cases: list[Case], out_dir: str) -> None:
    """Bars of each run, and black lines at the paper's figures or at both ends of its ranges."""
    names = list(dict.fromkeys(case.lengths for case in cases))
    figure, axes = figures.panels(1, len(names), size=(5.5, 4), sharey=True)
    for panel, name in zip(axes[0], names, strict=True):
        chosen = [case for case in cases if case.lengths == name]
        runs = {run: [getattr(c, run) for c in chosen] for run in ("real", "likewise", "opt_13b")}
        known = {run: percents for run, percents in runs.items() if any(percents)}
        figures.bars(panel, [f"{case.method}\n{case.width}" for case in chosen], known)
        for i, case in enumerate(chosen):
            papers = PAPER_PERCENT.get((name, case.method, case.width), ())
            panel.hlines(papers, i - 0.45, i + 0.45, color="k")
        panel.set_title(name)
    axes[0, 0].set_ylabel("blocks saved by sharing (%)")
    axes[0, 0].legend(title="black: the paper")
    figures.save(figure, out_dir, "memory_sharing.png")


def main(config: Config) -> None:
    points = [
        Point(lengths, method, width)
        for lengths in config.lengths
        for method in METHODS
        for width in config.widths
    ]
    requests: dict[str, dict[str, list[WorkloadRequest]]] = {}
    real: dict[Point, RealRow] = {}
    opt_13b: dict[Point, float] = {}
    if "real" in config.runs:
        # Requests share nothing with each other.
        options = engine_options(config) | {"enable_prefix_caching": False}
        with closing(Engine(config.model, **options)) as engine:
            drawn = {lengths: real_requests(config, engine, lengths) for lengths in config.lengths}
            requests["real_requests"] = drawn
            engine.warm_up()
            measure = RealRuns(engine, drawn, config.seed).measure
            rows = grid(measure, points, config, unit="run", description="real")
        real = dict(zip(points, rows, strict=True))
    if "simulated" in config.runs:
        drawn = {
            lengths: draw_requests(config, lengths, config.num_requests, vocab_size=VOCAB_SIZE)
            for lengths in config.lengths
        }
        requests["opt_13b_requests"] = drawn
        percents = grid(
            partial(measure_opt_13b, config, drawn),
            points,
            config,
            unit="run",
            description="OPT-13B",
            processes=config.processes,
        )
        opt_13b = dict(zip(points, percents, strict=True))

    nothing: RealRow = (None, None, [])
    cases = [
        Case(
            *point,
            *real.get(point, nothing)[:2],
            opt_13b.get(point),
            " to ".join(map(str, PAPER_PERCENT.get(point, ()))) or None,
        )
        for point in points
    ]
    apart = [row for *_, rows in real.values() for row in rows]
    facts: dict[str, Any] = {
        run: {lengths: length_facts(drawn) for lengths, drawn in by_lengths.items()}
        for run, by_lengths in requests.items()
    }
    report(
        "Blocks saved by sharing (%)",
        cases,
        config,
        **facts,
        tokens_apart=[row._asdict() for row in apart],
    )
    if apart:
        print_table("Tokens for which the beams have been apart", Apart._fields, apart)
    for name, by_lengths in facts.items():
        for lengths, values in by_lengths.items():
            mean_prompt, mean_output = values["mean_prompt_tokens"], values["mean_output_tokens"]
            print(
                f"{name}, {lengths}: {values['requests']}, on average {mean_prompt:.1f} prompt and "
                f"{mean_output:.1f} output tokens"
            )
    plot(cases, config.out_dir)


def claims(results: Results) -> Iterator[Claim]:
    """Blocks saved at OPT-13B's scale, beside the paper's."""
    for row in results["cases"]:
        if row["opt_13b"] is not None and row["paper"] is not None:
            yield claim(
                f"blocks saved: {row['lengths']}, {row['method']} {row['width']}",
                paper=f"{row['paper']} %",
                found=row["opt_13b"],
                ours=f"{row['opt_13b']:.1f} %",
                rule=within_points(5, *map(float, row["paper"].split(" to "))),
                note="next tokens are drawn from a distribution fitted to SmolLM2's; to save less, "
                "OPT-13B's beams would have to stay apart for longer"
                if row["method"] == "beam"
                else "lengths alone decide",
            )


if __name__ == "__main__":
    run(main, Config)
