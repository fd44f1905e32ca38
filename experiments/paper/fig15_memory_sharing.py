"""How much KV memory parallel sampling and beam search save by sharing blocks (Figure 15).

    python -m experiments.paper.fig15_memory_sharing --quick
    python -m experiments.paper.fig15_memory_sharing
    python -m experiments.paper.fig15_memory_sharing --runs=simulated --widths=2,8,16 --block_size=8

Saved are the blocks that sharing makes unnecessary, as a share of all that would be held without it
(Kwon et al., section 6.3), over all iterations of a run. Requests have ShareGPT's and Alpaca's mean
lengths, outputs of exactly the length drawn, and share nothing with each other. The runs are:

    real       SmolLM2 over the beginnings of ShareGPT conversations
    likewise   the same requests without the model: scheduler and memory manager alone, random
               samples, and beams whose next tokens are drawn as in
               `paged_jax/simulation/branching.py`
    opt_13b    the same with more requests in the memory that the paper had for OPT-13B

For parallel samples the first two must agree, as lengths alone decide. For beams the difference
tells how like a model's the drawn tokens are; a second table compares for how many tokens beams
have been apart.

Expect minutes with --quick, which cuts the outputs of the real run, so that prompts and what they
save weigh more, and half an hour or so without on two CPU cores.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib import figures
from experiments.lib.claims import Claim, Results, claim, within_points
from experiments.lib.driver import require_fitting, serve
from experiments.lib.experiment import grid, run
from experiments.lib.fake_devices import BatchRecorder, BranchingDevice
from experiments.lib.options import SimulationOptions, engine_option, engine_options, option
from experiments.lib.reporting import print_rows, report, spread
from paged_jax import Engine, SamplingParams
from paged_jax.engine.core import EngineCore
from paged_jax.executor.interface import Executor
from paged_jax.memory.usage import MemoryUsage
from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.scheduling.request import Request
from paged_jax.scheduling.scheduler import Scheduler
from paged_jax.simulation.executor import VOCAB_SIZE
from paged_jax.simulation.run import SystemConfig
from paged_jax.workloads import (
    PUBLISHED_LENGTHS,
    VocabRange,
    WorkloadRequest,
    build_workload,
    find_packaged_sharegpt,
    read_sharegpt,
)

RUNS = ("real", "simulated")
LENGTHS = tuple(PUBLISHED_LENGTHS)
METHODS = ("parallel", "beam")
WIDTHS = (2, 4, 6)
# By width; for ShareGPT the paper gives ranges over the widths.
PAPER_PERCENT: dict[tuple[str, str], dict[int, tuple[float, ...]]] = {
    ("alpaca", "parallel"): {2: (6.1,), 4: (8.5,), 6: (9.8,)},
    ("alpaca", "beam"): {2: (37.6,), 4: (53.1,), 6: (55.2,)},
    ("sharegpt", "parallel"): dict.fromkeys(WIDTHS, (16.2, 30.5)),
    ("sharegpt", "beam"): dict.fromkeys(WIDTHS, (44.3, 66.3)),
}


@dataclass(frozen=True, kw_only=True)
class Config(SimulationOptions):
    runs: tuple[str, ...] = option(RUNS, "The runs to make; real is two of them.", choices=RUNS)
    lengths: tuple[str, ...] = option(LENGTHS, "Lengths of the requests.", choices=LENGTHS)
    widths: tuple[int, ...] = option(WIDTHS, "Numbers of samples or beams of a request.", least=1)
    num_real_requests: int = option(12, "Number of the real run's requests.", quick=4, least=1)
    max_real_tokens: int = option(0, "Real outputs are cut to this; 0: not.", quick=96, least=0)
    num_requests: int = option(1000, "Number of opt_13b's requests.", quick=300, least=1)
    model: str = option("smollm2", "Name or path of the real model.")
    trace: str | None = option(None, "ShareGPT file. By default the installed package's.")
    block_size: int = engine_option("block_size")
    num_slots: int = option(15_700, "KV slots of OPT-13B, one for each token.", least=1)
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


Requests = dict[str, list[WorkloadRequest]]  # by the name of their lengths
Row = dict[str, Any]


def draw_requests(
    config: Config, count: int, *, vocab_size: int, max_tokens: int | None = None
) -> Requests:
    """Requests of random tokens; requests longer than the limit are left out."""
    drawn: Requests = {}
    for lengths in config.lengths:
        drawn[lengths], notes = build_workload(
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
    return drawn


# What sharing saves, measured on any engine, real or simulated


def simulate(
    requests: Sequence[WorkloadRequest],
    params: SamplingParams,
    scheduler: Scheduler,
    executor: Executor,
) -> list[MemoryUsage]:
    """Serve requests that are all there at the start; returns the memory's use in each iteration.

    As in the paper, requests share nothing with each other: leave the prefix cache off.
    """
    usages: list[MemoryUsage] = []
    core = EngineCore(scheduler, executor, on_iteration=lambda stats: usages.append(stats.usage))
    for index, request in enumerate(requests):
        own = replace(params, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
        scheduler.add(Request(str(index), request.prompt_token_ids, own, 0.0, seed=index))
    while scheduler.has_work:
        core.report(core.step())
    return usages


def with_sharegpt_text(
    requests: Sequence[WorkloadRequest],
    encode: Callable[[str], Sequence[int]],
    *,
    trace: str | Path | None,
    seed: int,
) -> list[WorkloadRequest]:
    """The requests, each with the beginning of a ShareGPT conversation of its own as its prompt.

    trace: a ShareGPT file; None takes the installed package's. ValueError where no conversation
    that is left is as long as a prompt.
    """
    exchanges, notes = read_sharegpt(trace or find_packaged_sharegpt())
    for note in notes:
        print(f"sharegpt: {note}")
    order = np.random.default_rng(seed).permutation(len(exchanges))
    texts: Iterator[list[int]] = (
        list(encode(f"{exchanges[i].prompt}\n{exchanges[i].reply}")) for i in order
    )
    read: list[list[int]] = []  # texts that no prompt has taken yet
    filled = []
    for request in requests:
        length = request.num_prompt_tokens
        while (tokens := next((text for text in read if len(text) >= length), None)) is None:
            if (text := next(texts, None)) is None:
                raise ValueError(f"no ShareGPT conversation is left with {length} tokens or more")
            read.append(text)
        read.remove(tokens)
        filled.append(replace(request, prompt_token_ids=tuple(tokens[:length])))
    return filled


def saved_fraction(usages: Iterable[MemoryUsage]) -> float:
    """Blocks saved by sharing over blocks without sharing (Kwon et al., section 6.3).

    Both are summed over the iterations: one with more memory in use weighs more.
    """
    shared = used = 0
    for usage in usages:
        shared += usage.shared
        used += usage.total - usage.free
    if not shared + used:
        raise ValueError("no memory was used, so none can have been saved")
    return shared / (shared + used)


def num_tokens_apart(beams: Sequence[Sequence[int]]) -> int:
    """For how many tokens, up to the last one, these beams of equal length have differed."""
    tokens = np.array(beams)
    differs = (tokens != tokens[0]).any(axis=0)
    return len(differs) - int(differs.argmax()) if differs.any() else 0


def beams_apart(batch: ScheduledBatch) -> list[int]:
    """How long the beams are apart, for each search with several beams in the batch."""
    searches: dict[str, list[list[int]]] = {}
    for seq in batch.decodes:
        if seq.request.beam_search is not None:
            searches.setdefault(seq.request.request_id, []).append(seq.token_ids)
    return [num_tokens_apart(beams) for beams in searches.values() if len(beams) > 1]


# The runs


class RealRuns:
    """One engine, and beside it a system of the same limits without a model."""

    def __init__(self, config: Config, engine: Engine):
        drawn = draw_requests(
            config,
            config.num_real_requests,
            vocab_size=engine.config.vocab_size,
            max_tokens=config.max_real_tokens or None,
        )
        encode = partial(engine.tokenizer.encode, verbose=False)
        self.requests = {
            lengths: with_sharegpt_text(requests, encode, trace=config.trace, seed=config.seed)
            for lengths, requests in drawn.items()
        }
        for requests in self.requests.values():
            require_fitting(engine, requests)
        engine.warm_up()
        self._engine, self._seed = engine, config.seed
        self._recorder = engine.core.executor = BatchRecorder(engine.executor, beams_apart)
        limits = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        same = {name: getattr(engine, name) for name in limits}
        self._system = SystemConfig(num_slots=engine.num_blocks * engine.block_size, **same)

    def measure(self, point: Point) -> Row:
        """Saved percent of both runs, and for how many tokens all beams of a search were apart."""
        requests = self.requests[point.lengths]
        real = serve(self._engine, requests, point.params)
        if refused := [served.refusal for served in real.served if served.refusal]:
            raise ValueError(refused[0])
        scheduler = self._system.scheduler()
        device = BranchingDevice(scheduler.memory, seed=self._seed)
        recorder = BatchRecorder(device, beams_apart)
        likewise = simulate(requests, point.params, scheduler, recorder)
        apart = {"real": self._recorder.take(), "likewise": recorder.take()}
        return {
            "real": 100 * saved_fraction(step.usage for step in real.steps),
            "likewise": 100 * saved_fraction(likewise),
            "apart": [
                {"lengths": point.lengths, "width": point.width, "run": run}
                | spread(counts, percents=(50, 90))
                for run, counts in apart.items()
                if point.method == "beam"
            ],
        }


def measure_opt_13b(config: Config, drawn: Requests, point: Point) -> Row:
    """Saved percent with as many KV slots as the paper had for OPT-13B on an A100."""
    slots, max_len = config.num_slots, config.max_model_len
    system = SystemConfig(num_slots=slots, block_size=config.block_size, max_model_len=max_len)
    scheduler = system.scheduler()
    device = BranchingDevice(scheduler.memory, seed=config.seed)
    usages = simulate(drawn[point.lengths], point.params, scheduler, device)
    return {"opt_13b": 100 * saved_fraction(usages)}


def length_facts(run: str, drawn: Requests) -> dict[str, Row]:
    """How many and how long the requests of a run are, for results.json and stdout."""
    facts = {
        lengths: {
            "requests": len(requests),
            "mean_prompt_tokens": float(np.mean([r.num_prompt_tokens for r in requests])),
            "mean_output_tokens": float(np.mean([r.max_tokens for r in requests])),
        }
        for lengths, requests in drawn.items()
    }
    print_rows(run, [{"lengths": lengths, **fact} for lengths, fact in facts.items()])
    return facts


def plot(rows: list[Row], out_dir: str) -> None:
    """Bars of each run, and black lines at the paper's figures or at both ends of its ranges."""
    names = list(dict.fromkeys(row["lengths"] for row in rows))
    figure, axes = figures.panels(1, len(names), size=(5.5, 4), sharey=True)
    for panel, name in zip(axes[0], names, strict=True):
        own = [row for row in rows if row["lengths"] == name]
        runs = {run: [row[run] for row in own] for run in ("real", "likewise", "opt_13b")}
        known = {run: percents for run, percents in runs.items() if any(percents)}
        figures.bars(panel, [f"{row['method']}\n{row['width']}" for row in own], known)
        for i, row in enumerate(own):
            papers = PAPER_PERCENT.get((name, row["method"]), {}).get(row["width"], ())
            panel.hlines(papers, i - 0.45, i + 0.45, color="k")
        panel.set_title(name)
    axes[0, 0].set_ylabel("blocks saved by sharing (%)")
    axes[0, 0].legend(title="black: the paper")
    figures.save(figure, out_dir, "memory_sharing.png")


def main(config: Config) -> None:
    points = list(starmap(Point, product(config.lengths, METHODS, config.widths)))
    found: list[list[Row]] = []
    facts: dict[str, Any] = {}
    if "real" in config.runs:
        # Requests share nothing with each other.
        options = engine_options(config) | {"enable_prefix_caching": False}
        with closing(Engine(config.model, **options)) as engine:
            real = RealRuns(config, engine)
            found.append(grid(real.measure, points, config, unit="real run"))
        facts["real_requests"] = length_facts("real_requests", real.requests)
    if "simulated" in config.runs:
        drawn = draw_requests(config, config.num_requests, vocab_size=VOCAB_SIZE)
        measure = partial(measure_opt_13b, config, drawn)
        processes = config.processes
        found.append(grid(measure, points, config, unit="OPT-13B run", processes=processes))
        facts["opt_13b_requests"] = length_facts("opt_13b_requests", drawn)

    rows: list[Row] = []
    apart: list[Row] = []
    for index, point in enumerate(points):
        # Percent of the blocks without sharing; None where a run was left out.
        row = point._asdict() | dict.fromkeys(("real", "likewise", "opt_13b"))
        for measured in found:
            row |= measured[index]
        apart += row.pop("apart", [])
        papers = PAPER_PERCENT.get(point[:2], {}).get(point.width, ())
        rows.append(row | {"paper": " to ".join(map(str, papers)) or None})
    report("Blocks saved by sharing (%)", rows, config, **facts, tokens_apart=apart)
    if apart:
        print_rows("Tokens for which the beams have been apart", apart)
    plot(rows, config.out_dir)


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
