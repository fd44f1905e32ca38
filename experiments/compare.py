"""Whether a change may be rolled out: the same workload under two configurations or kernels.

    python -m experiments.compare --candidate="--block_size=32"
    python -m experiments.compare --baseline="--attention=xla" --candidate="--attention=mosaic_gpu"
    python -m experiments.compare --candidate="--pipelined" --workload=lengths --lengths=60,60
    python -m experiments.compare --quick --common="--max_num_seqs=8" --candidate="--block_size=8"

--baseline, --candidate and --common (of both) take the engine flags of `experiments.serve`; what is
asked takes its workload flags. Both engines are built and warmed up, then serve the workload in
turn, --rounds times. Are the outputs equal, token by token, and where do they first differ? What is
the ratio of throughput and of p50 and p99 latency, candidate over baseline, and between what bounds
does it lie, round paired with round?

Exit code 0: the outputs are equal, and every ratio is within its limit with all of its interval.
1: outputs differ, or a ratio is beyond its limit with all of its interval. 3: neither; an interval
is still too wide, and more --rounds make it narrower. 2 is bad input.

Expect a table of ratios in a few minutes on two CPU cores. --out_dir gets results.json,
results.csv, differences.jsonl and compare.png.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from absl import flags

from experiments.lib import reporting, workload_flags
from experiments.lib.comparing_differences import Difference, differences
from experiments.lib.comparing_ratios import FIGURES, Compared, compare_figure
from experiments.lib.comparing_sides import (
    BASELINE,
    CANDIDATE,
    check_fitting,
    engines,
    parse_side,
    serve_in_turn,
    timed,
)
from experiments.lib.engine_flags import engine_facts

flags.adopt_module_key_flags(workload_flags)

_COMMON = flags.DEFINE_string("common", "", "Engine flags of both sides.")
_BASELINE = flags.DEFINE_string("baseline", "", "Engine flags of what is there.")
_CANDIDATE = flags.DEFINE_string("candidate", "", "Engine flags of what is to take its place.")
_ROUNDS = flags.DEFINE_integer(
    "rounds",
    5,
    "How often each side serves the workload, one unmeasured time apart.",
    lower_bound=2,
)
_MIN_EQUAL = flags.DEFINE_float(
    "min_equal", 1.0, "Share of the requests whose outputs must be equal.", 0.0, 1.0
)
_MIN_THROUGHPUT = flags.DEFINE_float(
    "min_throughput_ratio", 0.95, "Tokens/s of the candidate over the baseline's, at least.", 0.0
)
_MAX_LATENCY = flags.DEFINE_float(
    "max_latency_ratio", 1.1, "Each latency of the candidate over the baseline's, at most.", 0.0
)
_CONFIDENCE = flags.DEFINE_float("confidence", 0.95, "Of the intervals.", 0.5, 0.9999)
_QUICK = flags.DEFINE_bool("quick", False, "Three rounds of eight requests of 32 tokens.")
_OUT_DIR = flags.DEFINE_string("out_dir", "out/compare", "Folder for the results.")

_NUM_SHOWN = 10
_QUICK_VALUES = {"rounds": 3, "num_requests": 8, "max_tokens": 32}
PASSES, FAILS, UNCLEAR = 0, 1, 3  # exit codes


def main() -> None:
    if _QUICK.value:
        for name, value in _QUICK_VALUES.items():
            if not flags.FLAGS[name].present:
                flags.FLAGS[name].value = value
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    params, lengths = workload_flags.sampling_params(), workload_flags.lengths()
    sides = {
        flag.name: parse_side(flag.name, _COMMON.value, flag.value)
        for flag in (_BASELINE, _CANDIDATE)
    }
    with engines(sides, seed=workload_flags.SEED.value) as built:
        workload = workload_flags.make_workload(built[BASELINE], lengths)
        check_fitting(built, workload, params)
        for note in workload.notes:
            print(note)
        runs = serve_in_turn(built, workload, params, _ROUNDS.value)
        facts = {name: engine_facts(engine) for name, engine in built.items()}

    rounds = list(zip(runs[BASELINE], runs[CANDIDATE], strict=True))
    differing = [list(differences(before.served, after.served)) for before, after in rounds]
    unsteady = [list(differences(rounds[0][0].served, before.served)) for before, _ in rounds[1:]]
    num_requests = len(workload.requests)
    equal = 1 - max(map(len, differing)) / num_requests
    compared = [
        compare_figure(
            figure,
            timed(runs[BASELINE]),
            timed(runs[CANDIDATE]),
            limit=_MIN_THROUGHPUT.value if figure.more_is_better else _MAX_LATENCY.value,
            confidence=_CONFIDENCE.value,
        )
        for figure in FIGURES
    ]
    code, reasons = verdict(equal, compared)

    worst = max(differing, key=len)
    print()
    print_differences(worst, equal, num_requests)
    if any(unsteady):
        print(f"The baseline differs from itself in {sum(map(bool, unsteady))} of its rounds.")
    cases = [case(each) for each in compared]
    reporting.write_jsonl(out_dir, "differences.jsonl", worst)
    reporting.report_cases(
        "Candidate over baseline",
        cases,
        out_dir,
        _BASELINE,
        workload=reporting.flag_values(workload_flags.WORKLOAD),
        engines=facts,
        requests=num_requests,
        equal=equal,
        baseline_differs_from_itself=any(unsteady),
        first_difference=None if not worst else earliest(worst),
        exit_code=code,
        reasons=reasons,
    )
    plot(compared, out_dir / "compare.png")
    print(f"{ {PASSES: 'PASSES', FAILS: 'FAILS', UNCLEAR: 'UNCLEAR'}[code] }: {'; '.join(reasons)}")
    print(f"Results are in {out_dir}")
    sys.exit(code)


def verdict(equal: float, compared: list[Compared]) -> tuple[int, list[str]]:
    """The exit code, and what it is for."""
    failures = [f"{each.figure} is worse" for each in compared if each.verdict == "worse"]
    if equal < _MIN_EQUAL.value:
        failures.insert(0, f"only {equal:.1%} of the requests have equal outputs")
    if failures:
        return FAILS, failures
    unclear = [each.figure for each in compared if each.verdict == "unclear"]
    if unclear:
        return UNCLEAR, [f"raise --rounds: not sure of {', '.join(unclear)}"]
    return PASSES, ["outputs are equal enough, and no figure is worse than its limit"]


def earliest(found: list[Difference]) -> Difference:
    """The one that comes at the earliest token; requests that were not served come first."""
    return min(found, key=lambda each: -1 if each.continuation is None else each.token or 0)


def print_differences(found: list[Difference], equal: float, num_requests: int) -> None:
    """How many outputs differ, and the first ones that do."""
    print(f"Outputs are equal for {equal:.1%} of {num_requests} requests.")
    if not found:
        return
    rows = [list(asdict(each).values()) for each in found[:_NUM_SHOWN]]
    columns = ("request", "continuation", "first at token", "baseline", "candidate")
    reporting.print_table(
        f"{min(len(found), _NUM_SHOWN)} of {len(found)} that differ", columns, rows
    )


def case(compared: Compared) -> dict[str, Any]:
    """A row of the table."""
    ratio = compared.ratio
    return {
        "figure": compared.figure,
        "baseline": compared.baseline,
        "candidate": compared.candidate,
        "ratio": ratio and ratio.mean,
        "low": ratio and ratio.low,
        "high": ratio and ratio.high,
        "limit": compared.limit,
        "verdict": compared.verdict,
    }


def plot(compared: list[Compared], path: Path) -> None:
    """Each ratio with its interval and its limit."""
    # Imported here, so that --help does not wait for it.
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.5 * len(compared) + 1.5), layout="constrained")
    colors = {"ok": "tab:green", "worse": "tab:red", "unclear": "tab:orange"}
    for row, each in enumerate(reversed(compared)):
        if each.ratio is None:  # there is no such figure
            continue
        ratio, color = each.ratio, colors[each.verdict]
        axes.plot([ratio.low, ratio.high], [row, row], color=color)
        axes.plot(ratio.mean, row, "o", color=color)
        axes.plot(each.limit, row, "k|", markersize=14)
    axes.axvline(1, color="0.7", zorder=0)
    axes.set_yticks(range(len(compared)), [each.figure for each in reversed(compared)])
    axes.set_xscale("log")
    axes.set_xlabel("candidate / baseline; bars: its limit")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    reporting.run(main)
