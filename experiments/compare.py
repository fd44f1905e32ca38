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

Expect a table of ratios in a few minutes on two CPU cores. --out_dir gets results.json,
results.csv, differences.jsonl and compare.png.
"""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

import jax
from absl import flags

from experiments.lib import Options, option, options, reporting, run
from experiments.lib.comparison import FIGURES, Compared, compare_figure, differences, earliest
from experiments.lib.driver import ServedRun, require_fitting, serve
from experiments.lib.engine_options import EngineOptions, engine_facts
from experiments.lib.paired import in_turn
from experiments.lib.workload_options import WorkloadOptions
from paged_jax import Engine


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
        for number, name in in_turn(*SIDES, config.rounds + 1):  # the first round warms up
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
