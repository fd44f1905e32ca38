"""What continuous batching costs the tail, and what chunked prefill and admission control save.

    python -m experiments.costs.tail_latency --quick
    python -m experiments.costs.tail_latency
    python -m experiments.costs.tail_latency --rates=0.2,0.4,0.8 --gap_s=2 --ttft_s=30

Short requests decode while long prompts arrive among them, at rising rates. Four systems serve the
same arrivals, on the same model and with the same memory:

    static              a batch is formed when nothing runs, and none joins until all have ended
    continuous          requests join and leave in every iteration; each prompt is prefilled whole
    chunked             prompts are prefilled in chunks of at most --max_num_batched_tokens
    admission           as chunked; chunks are held back to keep the time between two tokens within
                        the objective, and requests are refused that would wait too long

A whole prompt holds up the next token of all requests: watch the p99 of the gaps between tokens,
and at low rates the longest gap. Chunks bound both, and make long prompts wait longer for their
first token. Beyond the rate that the machine can serve all requests are late, unless some are
refused at once: watch the goodput, the requests a second that keep the objective.

The chunked system's capacity is its rate when all requests are there at the start. An objective
that is not given comes from the same run: a gap may take three iterations with a full chunk, the
first token three times a long prompt's prefill.

Expect ten minutes with --quick and three quarters of an hour without, on two CPU cores.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from experiments.lib import figures
from experiments.lib.claims import Claim, Results, Rule, claim
from experiments.lib.driver import ServedRequest, ServedRun, require_fitting, serve
from experiments.lib.experiment import grid, run
from experiments.lib.options import Options, engine_option, engine_options, option
from experiments.lib.reporting import print_rows, print_table, spread, write_results
from experiments.lib.serving_figures import batch_size, outcome
from paged_jax import Engine, SamplingParams
from paged_jax.loading import LoadedModel, load_config, load_model
from paged_jax.workloads import WorkloadRequest, arrive_at_once, arrive_poisson
from paged_jax.workloads.request import VocabRange, random_token_ids

GOAL = 0.5  # p99 of the gaps with chunks, of that without, at most
SYSTEMS: dict[str, dict[str, Any]] = {
    "static": {"scheduling_policy": "static", "enable_chunked_prefill": False},
    "continuous": {"enable_chunked_prefill": False},
    "chunked": {},
    "admission": {},  # its limits follow from the objective
}

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    loads: tuple[float, ...] = option((0.4, 0.8, 1.6), "Rates, over capacity.", quick=(0.5, 1.5))
    rates: tuple[float, ...] | None = option(None, "Request rates (1/s), instead of --loads.")
    num_requests: int = option(48, "A run has so many requests.", quick=18, least=2)
    long_every: int = option(9, "One in so many requests has a long prompt.", least=2)
    long_prompt: int = option(4096, "A long prompt has so many tokens.", least=2)
    long_output: int = option(8, "A long prompt's output has so many tokens.", least=1)
    short_prompt: int = option(32, "The other prompts have so many tokens, in the mean.", least=2)
    short_output: int = option(48, "Their outputs have so many tokens, in the mean.", least=2)
    gap_s: float | None = option(None, "The objective for the time between tokens (s).", least=0)
    ttft_s: float | None = option(None, "The objective for the time to first token (s).", least=0)
    model: str = option("smollm2", "The model's name or path.")
    block_size: int = engine_option("block_size")
    num_blocks: int | None = option(None, "Blocks. By default four long prompts fit.", least=1)
    max_num_seqs: int = engine_option("max_num_seqs", 16)
    max_num_batched_tokens: int = engine_option("max_num_batched_tokens", 256)

    def __post_init__(self) -> None:
        for name, values in (("loads", self.loads), ("rates", self.rates or (1,))):
            if not all(0 < value < float("inf") for value in values):
                given = ",".join(f"{value:g}" for value in values)
                raise ValueError(f"--{name} takes numbers above 0, got {given}")

    @property
    def max_len(self) -> int:
        """The longest prompt and output together."""
        longest_short = 3 * (self.short_prompt + self.short_output) // 2
        return max(self.long_prompt + self.long_output, longest_short)

    def requests(self, vocab: VocabRange) -> list[WorkloadRequest]:
        """Random tokens, no two prompts alike; all of fixed lengths, there at the start."""
        rng = np.random.default_rng(self.seed)

        def around(mean: int) -> int:
            return int(rng.integers(max(1, mean // 2), max(1, 3 * mean // 2) + 1))

        found = []
        for index in range(self.num_requests):
            num_prompt, num_output = self.long_prompt, self.long_output
            if index % self.long_every != self.long_every // 2:
                num_prompt, num_output = around(self.short_prompt), around(self.short_output)
            prompt = tuple(random_token_ids(rng, num_prompt, vocab))
            found.append(WorkloadRequest(prompt, num_output))
        return found

    def num_long(self, requests: Sequence[WorkloadRequest]) -> int:
        return sum(request.num_prompt_tokens == self.long_prompt for request in requests)


class Objective(NamedTuple):
    """The times that a request is promised, in seconds."""

    ttft_s: float  # from its arrival to its first token, at most
    gap_s: float  # from each of its tokens to the next, at most

    def is_met(self, served: ServedRequest) -> bool:
        """Whether the request got all its tokens, and got them in time."""
        if served.output is None or outcome(served) is not None:
            return False
        times = served.output.metrics.token_times_s[0]
        in_time = times[0] - served.output.metrics.arrival_s <= self.ttft_s
        return in_time and max(gaps_of(times), default=0.0) <= self.gap_s


def case_of(system: str, rate: float, run: ServedRun, objective: Objective) -> Row:
    """The figures of a run. Times from a request's arrival or its last token on."""
    firsts: list[float] = []
    gaps: list[float] = []
    outputs = [served.output for served in run.served if served.output is not None]
    for output in outputs:
        for times in filter(None, output.metrics.token_times_s):
            firsts.append(times[0] - output.metrics.arrival_s)
            gaps += gaps_of(times)
    ttft, gap = spread(firsts), spread(gaps, (50, 99, 100))
    beside = [step.num_prefill_tokens for step in run.steps if step.num_decodes]
    return {
        "system": system,
        "rate": rate,  # requests/s that arrive
        "requests": len(run.served),
        "refused": len(run.served) - len(outputs),
        "ttft_p50_s": ttft["p50"],
        "ttft_p99_s": ttft["p99"],
        "gap_p50_s": gap["p50"],  # between two tokens of a request, all requests together
        "gap_p99_s": gap["p99"],
        "gap_max_s": gap["p100"],
        "tokens_per_s": (len(firsts) + len(gaps)) / run.wall_s,  # of output
        "goodput": sum(map(objective.is_met, run.served)) / run.wall_s,  # within the objective
        "batch_size": float(np.mean(list(map(batch_size, run.steps)))),
        "largest_prefill": max(beside, default=0),  # tokens beside decodes, in an iteration
    }


def gaps_of(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


@cache
def load(config: Config) -> tuple[LoadedModel, list[WorkloadRequest]]:
    """The model, and the requests to it."""
    model = load_model(config.model)
    return model, config.requests(VocabRange(0, model.config.vocab_size))


@contextmanager
def warm_engine(config: Config, **options: Any) -> Iterator[Engine]:
    """An engine for which all is compiled, and which has served some of the requests.

    Nothing is shared between requests, so that systems differ in scheduling alone.
    """
    model, requests = load(config)
    own = engine_options(config) | {"max_model_len": config.max_len} | options
    own["num_blocks"] = config.num_blocks or 4 * -(-config.max_len // config.block_size)
    if not own.get("enable_chunked_prefill", True):
        own["max_num_batched_tokens"] = config.max_len
    with closing(Engine(model, **own, enable_prefix_caching=False)) as engine:
        require_fitting(engine, requests)
        engine.warm_up()
        for request in requests[: config.long_every]:
            params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
            engine.generate(list(request.prompt_token_ids), params, progress=False)
        yield engine


def measure_capacity(system: str, config: Config) -> tuple[float, Objective]:
    """(requests/s when all are there at the start, the objective that is given or follows)."""
    requests = load(config)[1]
    with warm_engine(config, **SYSTEMS[system]) as engine:
        run = serve(engine, arrive_at_once(requests), SamplingParams(temperature=0))
        estimates = engine.core.scheduler.estimates  # of the steps that the engine has measured
    full_chunk_s = estimates.prefill_s(config.max_num_batched_tokens)
    assert full_chunk_s is not None
    iteration_s = full_chunk_s + (estimates.decode_s or 0.0)
    num_chunks = -(-config.long_prompt // config.max_num_batched_tokens)
    ttft_s = config.ttft_s or 3 * num_chunks * iteration_s
    return len(requests) / run.wall_s, Objective(ttft_s, config.gap_s or 3 * iteration_s)


def measure(
    point: tuple[str, dict[str, Any]], config: Config, rates: list[float], objective: Objective
) -> list[Row]:
    """Serve the same requests at each rate, by one engine: (system, its options)."""
    system, options = point
    cases = []
    with warm_engine(config, **options) as engine:
        for rate in rates:
            requests = arrive_poisson(load(config)[1], rate=rate, seed=config.seed)
            run = serve(engine, requests, SamplingParams(temperature=0))
            cases.append(case_of(system, rate, run, objective))
    return cases


def plot(cases: Sequence[Row], objective: Objective, out_dir: str) -> None:
    """Four panels over the request rate: first token, gaps, goodput, output tokens/s."""
    figure, axes = figures.panels(2, 2, size=(5, 3.5))
    for panel, label, names, limit in (
        (axes[0, 0], "time to first token (s)", ("ttft_p99_s", "ttft_p50_s"), objective.ttft_s),
        (axes[0, 1], "time between two tokens (s)", ("gap_p99_s", "gap_p50_s"), objective.gap_s),
        (axes[1, 0], "goodput (requests/s)", ("goodput",), None),
        (axes[1, 1], "output tokens/s", ("tokens_per_s",), None),
    ):
        for name, style in zip(names, ("o-", "o:"), strict=False):
            named = "{system}, p99" if style == "o-" else "_{system}"  # which legends leave out
            by_system = figures.series(cases, "rate", name, named.format_map)
            for number, line in enumerate(by_system.items()):
                figures.lines(panel, dict([line]), style, color=f"C{number}")
        if limit is not None:
            panel.axhline(limit, color="0.6", linewidth=1, label="objective")
            panel.set_yscale("log")
        panel.set(xlabel="requests/s", ylabel=label + (" (dotted: p50)" if limit else ""))
    axes[0, 0].legend(fontsize="small")
    figures.save(figure, out_dir, "tail_latency.png")


def tail_ratio(rate: float, cases: Sequence[Row]) -> Row:
    """At a rate, the p99 gap with chunks over that without."""
    gaps = {case["system"]: case["gap_p99_s"] for case in cases if case["rate"] == rate}
    chunked, whole = gaps["chunked"], gaps["continuous"]
    ratio = chunked / whole if chunked is not None and whole else None
    row = {"rate": rate, "chunked_p99_s": chunked, "continuous_p99_s": whole}
    return row | {"ratio": ratio, "goal": GOAL}


def main(config: Config) -> None:
    model = load_config(config.model)
    if config.max_len > model.max_position_embeddings:
        raise ValueError(
            f"prompts and outputs of up to {config.max_len} tokens are beyond the "
            f"{model.max_position_embeddings} that {model.name} was made for; lower --long_prompt"
        )
    [(capacity, objective)] = grid(
        partial(measure_capacity, config=config), ["chunked"], config, unit="run"
    )
    rates = sorted(config.rates or (load * capacity for load in config.loads))
    admission = {
        "target_inter_token_s": objective.gap_s,
        # As many as have their first token in time (Little's law).
        "max_num_waiting": max(1, round(capacity * objective.ttft_s)),
    }
    systems = list((SYSTEMS | {"admission": admission}).items())
    measured = partial(measure, config=config, rates=rates, objective=objective)
    cases = [case for own in grid(measured, systems, config, unit="system") for case in own]

    num_requests, num_long = config.num_requests, config.num_long(load(config)[1])
    ratios = [tail_ratio(rate, cases) for rate in sorted(set(rates))]
    headings = [
        *("system", "rate", "requests", "refused", "ttft p50", "ttft p99", "gap p50", "gap p99"),
        *("gap max", "tokens/s", "goodput", "batch", "prefill"),
    ]
    title = f"{model.name}: {num_requests} requests, {num_long} of them with"
    values = [list(case.values()) for case in cases]
    print_table(f"{title} {config.long_prompt} tokens of prompt", headings, values)
    print_rows("p99 between two tokens: chunked over whole prompts", ratios)
    print(
        f"objective: first token within {objective.ttft_s:.3g} s, gaps within "
        f"{objective.gap_s:.3g} s; {capacity:.3g} requests/s when all are there at the start"
    )
    facts = {"capacity": capacity, "long_requests": num_long, "gap_p99_ratios": ratios}
    write_results(cases, config, objective=objective._asdict(), **facts)
    plot(cases, objective, config.out_dir)


def claims(results: Results) -> Iterator[Claim]:
    """What chunks save of the longest gaps; the paper gives no figure of it."""
    ratios = [row["ratio"] for row in results["gap_p99_ratios"] if row["ratio"] is not None]
    if ratios:
        yield claim(
            "p99 of the time between two tokens, chunked over whole prompts",
            paper="-",
            found=max(ratios),
            ours=f"{min(ratios):.2f} to {max(ratios):.2f}",
            rule=Rule("below 1 at every rate", lambda most: most < 1),
            note="few requests",
        )


if __name__ == "__main__":
    run(main, Config)
