"""Whether a change may be rolled out: the same workload under two configurations or kernels.

    python -m experiments.compare --candidate="--block_size=32"
    python -m experiments.compare --baseline="--attention=xla" --candidate="--attention=mosaic_gpu"
    python -m experiments.compare --candidate="--pipelined" --workload=lengths --lengths=60,60
    python -m experiments.compare --quick --common="--max_num_seqs=8" --candidate="--block_size=8"

--baseline, --candidate and --common (for both) take the engine flags of `experiments.serve`; its
workload flags say what is asked. Both engines are built and warmed up, then serve the workload in
turn, --rounds times. Are the outputs equal, token by token? What is the ratio of throughput and of
p50 and p99 latency, candidate over baseline, and within what bounds, round paired with round?

Exit code 0: the outputs are equal, and each ratio's whole interval is within its limit. 1: outputs
differ, or a whole interval is beyond its limit. 3: an interval is too wide for either; raise
--rounds. 2 is bad input.

Expect a table in a few minutes on two CPU cores. differences.jsonl has outputs that differ.
"""

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Literal, NamedTuple

import jax
import numpy as np
from absl import flags
from scipy import special

from experiments.lib import Options, option, options, reporting, run
from experiments.lib.driver import ServedRequest, ServedRun, require_fitting, serve
from experiments.lib.paired import in_turn
from experiments.lib.serving_figures import complete_outputs, latencies, num_output_tokens, outcome
from experiments.lib.serving_options import EngineOptions, WorkloadOptions, engine_facts
from paged_jax import CompletionOutput, Engine


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Options):
    common: str = option("", "Both sides take these engine flags.")
    baseline: str = option("", "The side that is there already takes these.")
    candidate: str = option("", "The side that may take its place takes these.")
    rounds: int = option(5, "Each side serves the workload so often, warmed up.", quick=3, least=2)
    min_equal: float = option(1.0, "Least share of requests with equal outputs.", least=0, most=1)
    min_throughput_ratio: float = option(0.95, "Least ratio of the sides' tokens/s.", least=0)
    max_latency_ratio: float = option(1.1, "Greatest ratio of each of their latencies.", least=0)
    confidence: float = option(
        0.95, "Each interval holds its ratio with this probability.", least=0.5, most=0.9999
    )


Verdict = Literal["ok", "worse", "unclear", "none"]
BASELINE, CANDIDATE = SIDES = ("baseline", "candidate")
PASSES, FAILS, UNCLEAR = 0, 1, 3  # exit codes
VERDICTS = {PASSES: "PASSES", FAILS: "FAILS", UNCLEAR: "UNCLEAR"}
NUM_SHOWN = 10  # differences that are printed


def main(config: CompareConfig, asked: WorkloadOptions) -> int:
    params = asked.sampling_params()
    sides = {name: parse_side(name, config) for name in SIDES}
    with engines(sides, seed=config.seed) as built:
        workload = asked.make_workload(built[BASELINE], seed=config.seed)
        for name, engine in built.items():
            with naming(name):
                require_fitting(engine, workload.requests, params)
        for note in workload.notes:
            print(note)
        runs: dict[str, list[ServedRun]] = {name: [] for name in SIDES}
        for number, name in in_turn(SIDES, config.rounds + 1):  # the first round warms up
            runs[name].append(
                serve(
                    built[name],
                    workload.requests,
                    replace(params, cache_salt=f"round {number}"),  # none finds another's prefixes
                    priorities=workload.priorities,
                    timeout_s=workload.timeout_s,
                )
            )
        facts = {name: engine_facts(engine) for name, engine in built.items()}

    rounds = list(zip(runs[BASELINE], runs[CANDIDATE], strict=True))
    differing = [list(differences(before.served, after.served)) for before, after in rounds]
    unsteady = [list(differences(rounds[0][0].served, before.served)) for before, _ in rounds[1:]]
    num_requests = len(workload.requests)
    equal = 1 - max(map(len, differing)) / num_requests
    limits = {True: config.min_throughput_ratio, False: config.max_latency_ratio}
    compared = [
        compare_figure(
            figure,
            *(runs[name][1:] for name in SIDES),
            limit=limits[figure.more_is_better],
            confidence=config.confidence,
        )
        for figure in FIGURES
    ]
    code, reasons = verdict(equal, compared, config)

    worst = max(differing, key=len)
    print(f"\nOutputs are equal for {equal:.1%} of {num_requests} requests.")
    if worst:
        shown = [tuple(asdict(each).values()) for each in worst[:NUM_SHOWN]]
        columns = ("request", "continuation", "first at token", *SIDES)
        reporting.print_table(f"{len(shown)} of {len(worst)} that differ", columns, shown)
    if any(unsteady):
        print(f"The baseline differs from itself in {sum(map(bool, unsteady))} of its rounds.")
    reporting.write_jsonl(config.out_dir, "differences.jsonl", worst)
    reporting.report(
        "Candidate over baseline",
        compared,
        config,
        workload=options.as_dict(asked) | {"seed": config.seed},
        engines=facts,
        requests=num_requests,
        equal=equal,
        baseline_differs_from_itself=any(unsteady),
        first_difference=None if not worst else earliest(worst),
        exit_code=code,
        reasons=reasons,
    )
    plot(compared, config.out_dir)
    print(f"{VERDICTS[code]}: {'; '.join(reasons)}")
    return code


# The two sides


def parse_side(name: str, config: CompareConfig) -> EngineOptions:
    """The side's engine options; ValueError says which side has a flag that is wrong."""
    text: str = getattr(config, name)
    values = flags.FlagValues()
    options.define(EngineOptions, values)
    try:
        rest = values([name, *shlex.split(config.common), *shlex.split(text)])
    except (flags.Error, ValueError) as error:
        raise ValueError(f"--{name}={text!r}: {error}") from None
    if len(rest) > 1:
        raise ValueError(f"--{name}={text!r}: unexpected {rest[1]!r}; flags start with --")
    with naming(name):
        return options.from_flags(EngineOptions, values)


@contextmanager
def naming(side: str) -> Iterator[None]:
    """A ValueError in here says which side it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the {side}: {error}") from None


@contextmanager
def engines(sides: Mapping[str, EngineOptions], *, seed: int) -> Iterator[dict[str, Engine]]:
    """Both engines, with all their steps compiled."""
    if jax.default_backend() != "cpu" and any(side.num_blocks is None for side in sides.values()):
        raise ValueError(
            "both pools are in the device's memory, and the first would take what is free: give "
            "each side its --num_blocks"
        )
    with ExitStack() as stack:
        built = {}
        for name, side in sides.items():
            with naming(name):
                built[name] = side.make_engine(seed=seed)
            stack.callback(built[name].close)
        for engine in built.values():
            engine.warm_up()
        yield built


# Outputs


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose outputs differ. `token` counts output tokens from 0."""

    request_id: str
    continuation: int | None  # None: one of the two was not served
    token: int | None  # None: all tokens are equal, and the sequences end for other reasons
    baseline: str
    candidate: str


def differences(
    baseline: Sequence[ServedRequest], candidate: Sequence[ServedRequest]
) -> Iterator[Difference]:
    """The first difference of each request that has one, in their order."""
    for before, after in zip(baseline, candidate, strict=True):
        if before.output and after.output:
            pairs = zip(before.output.outputs, after.output.outputs, strict=True)
            found = ((i, *parts) for i, pair in enumerate(pairs) if (parts := _parting(*pair)))
            if (first := next(found, None)) is not None:
                yield Difference(before.request_id, *first)
        elif before.output is not after.output:
            yield Difference(before.request_id, None, None, _state(before), _state(after))


def _parting(one: CompletionOutput, other: CompletionOutput) -> tuple[int | None, str, str] | None:
    """Where two continuations part, and what each has there."""
    at = first_difference(one.token_ids, other.token_ids)
    if at is not None:
        return at, _token(one, at), _token(other, at)
    reasons = str(one.finish_reason), str(other.finish_reason)
    return (None, *reasons) if reasons[0] != reasons[1] else None


def earliest(found: list[Difference]) -> Difference:
    """The difference at the earliest token; requests that were not served come first."""
    return min(found, key=lambda each: -1 if each.continuation is None else each.token or 0)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two sequences of tokens part, perhaps because one ends; None if they are equal."""
    pairs = enumerate(zip_longest(one, other))
    return next((at for at, (token, other_token) in pairs if token != other_token), None)


def _token(out: CompletionOutput, at: int) -> str:
    return str(out.token_ids[at]) if at < len(out.token_ids) else "(ended)"


def _state(served: ServedRequest) -> str:
    found = outcome(served)
    return "served" if found is None else ": ".join(filter(None, found))


# Figures


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that is compared; `of` gives None for a run that has none."""

    name: str
    of: Callable[[ServedRun], float | None]
    more_is_better: bool


class Ratio(NamedTuple):
    """Candidate over baseline: the geometric mean of the rounds, and the interval of that mean."""

    mean: float
    low: float
    high: float


class Compared(NamedTuple):
    """A figure of both sides: a row of the table."""

    figure: str
    baseline: float | None  # median of the rounds
    candidate: float | None
    ratio: float | None  # candidate over baseline, between low and high
    low: float | None
    high: float | None
    limit: float  # the ratio may be this, at least or at most
    verdict: Verdict  # "none" where neither side has the figure


def paired_ratio(baseline: Sequence[float], candidate: Sequence[float], confidence: float) -> Ratio:
    """The ratio of positive figures in two rounds or more, by Student's t on their logarithms."""
    logs = np.log(np.divide(candidate, baseline))
    mean = float(np.mean(logs))
    quantile = float(special.stdtrit(len(logs) - 1, (1 + confidence) / 2))
    half_width = quantile * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half_width), math.exp(mean + half_width))


def judge(ratio: Ratio, limit: float, *, more_is_better: bool) -> Verdict:
    """The verdict is "ok" or "worse" only if the whole interval is on that side of the limit."""
    sign = 1 if more_is_better else -1
    margins = [sign * (bound - limit) for bound in (ratio.low, ratio.high)]
    return "ok" if min(margins) >= 0 else "worse" if max(margins) < 0 else "unclear"


def compare_figure(
    figure: Figure,
    baseline: Sequence[ServedRun],
    candidate: Sequence[ServedRun],
    *,
    limit: float,
    confidence: float,
) -> Compared:
    """One figure over all rounds; a round counts only if both sides have the figure."""
    rounds = list(zip(map(figure.of, baseline), map(figure.of, candidate), strict=True))
    both = [(one, other) for one, other in rounds if one and other]
    if len(both) < 2:
        verdict: Verdict = "unclear" if any(any(pair) for pair in rounds) else "none"
        return Compared(figure.name, None, None, None, None, None, limit, verdict)
    befores, afters = zip(*both, strict=True)
    ratio = paired_ratio(befores, afters, confidence)
    verdict = judge(ratio, limit, more_is_better=figure.more_is_better)
    medians = float(np.median(befores)), float(np.median(afters))
    return Compared(figure.name, *medians, *ratio, limit, verdict)


def _latency(name: str, percentile: str) -> Callable[[ServedRun], float | None]:
    return lambda run: latencies(complete_outputs(run))[name][percentile]


FIGURES = (
    Figure("output tokens/s", lambda run: num_output_tokens(run) / run.wall_s, more_is_better=True),
    *(
        Figure(f"{title}, {percentile} (s)", _latency(name, percentile), more_is_better=False)
        for name, title in (
            ("ttft_s", "time to first token"),
            ("inter_token_s", "token to token"),
            ("normalised_latency_s", "per output token, waiting included"),
        )
        for percentile in ("p50", "p99")
    ),
)


# The verdict


def verdict(equal: float, compared: list[Compared], config: CompareConfig) -> tuple[int, list[str]]:
    """The exit code, and the reasons for it."""
    failures = [f"{each.figure} is worse" for each in compared if each.verdict == "worse"]
    if equal < config.min_equal:
        failures.insert(0, f"only {equal:.1%} of the requests have equal outputs")
    if failures:
        return FAILS, failures
    if unclear := [each.figure for each in compared if each.verdict == "unclear"]:
        return UNCLEAR, [f"raise --rounds: not sure of {', '.join(unclear)}"]
    return PASSES, ["outputs are equal enough, and no figure is worse than its limit"]


def plot(compared: list[Compared], out_dir: str) -> None:
    """Each ratio with its interval and its limit."""
    from experiments.lib import figures  # here, so that --help does not wait for it

    figure, panels = figures.panels(size=(8, 0.5 * len(compared) + 1.5))
    axes = panels[0, 0]
    colors = {"ok": "tab:green", "worse": "tab:red", "unclear": "tab:orange"}
    for height, each in enumerate(reversed(compared)):
        if each.ratio is not None:  # there is such a figure
            color = colors[each.verdict]
            axes.plot([each.low, each.high], [height, height], color=color)
            axes.plot(each.ratio, height, "o", color=color)
            axes.plot(each.limit, height, "k|", markersize=14)
    axes.axvline(1, color="0.7", zorder=0)
    axes.set_yticks(range(len(compared)), [each.figure for each in reversed(compared)])
    axes.set_xscale("log")
    axes.set_xlabel("candidate / baseline; bars: its limit")
    figures.save(figure, out_dir, "compare.png")


if __name__ == "__main__":
    run(main, CompareConfig, WorkloadOptions)
