"""How much of the paper comes out again? Runs every experiment and writes one report.

    python -m experiments.paper.reproduce --quick
    python -m experiments.paper.reproduce
    python -m experiments.paper.reproduce --only=memory_waste,throughput
    python -m experiments.paper.reproduce --quick --mooncake=conversation.jsonl

Each experiment runs in a process of its own and leaves its results in a folder of --out_dir. Then
report.html (one file, with all plots) and report.md put the paper's figures beside those found
here, with a verdict on each claim by a rule that is fixed beforehand: reproduced, differs, or not
comparable where this machine or model cannot decide it. Notes say what differs.

What has run is kept: started again, it goes on where it was interrupted, and runs again only what
failed, or what another version of the code or other flags have made. --fresh runs all.

On two CPU cores, expect less than 10 minutes with --quick and less than 2 hours without. Exit code
1: an experiment failed; the report is written all the same.
"""

import sys
from pathlib import Path
from typing import Any

from absl import flags
from tqdm import tqdm

from experiments.lib import reporting
from experiments.paper.report import CLAIMS, Section, html_page, markdown, summary
from experiments.paper.reproduce_plan import (
    STEPS,
    Outcome,
    Step,
    chosen_steps,
    kept_outcome,
    results_of,
    run,
)

_QUICK = flags.DEFINE_bool("quick", False, "Short runs of everything.")
_ONLY = flags.DEFINE_list("only", [], f"Only these: {', '.join(step.name for step in STEPS)}.")
_MOONCAKE = flags.DEFINE_string(
    "mooncake", None, "A Mooncake trace (JSONL), for prefix_hit_rate, which runs only with one."
)
_FRESH = flags.DEFINE_bool("fresh", False, "Run again what has run already.")
_OUT_DIR = flags.DEFINE_string("out_dir", "out/reproduce", "Where the results go.")


def run_step(
    step: Step, more: tuple[str, ...], out_dir: Path, commit: str | None, bar: "tqdm[Any]"
) -> Outcome:
    """Of this run or of an earlier one."""
    folder = out_dir / step.name
    command = step.command(_QUICK.value, str(folder), more)
    if not _FRESH.value and (kept := kept_outcome(folder, command, commit)) is not None:
        return kept
    return run(command, folder, commit, lambda line: bar.set_postfix_str(line[-60:]))


def main() -> None:
    steps = chosen_steps(_ONLY.value, _MOONCAKE.value)
    out_dir = reporting.make_out_dir(_OUT_DIR.value)
    commit = reporting.git_commit(Path(__file__).parent)
    sections: list[Section] = []
    with tqdm(total=len(steps), unit="experiment") as bar:
        for step, more in steps:
            bar.set_description(step.name)
            folder = out_dir / step.name
            outcome = run_step(step, more, out_dir, commit, bar)
            claims = []
            if outcome.succeeded:
                claims = CLAIMS[step.name](results_of(folder))
            section = Section(step, folder, outcome, claims)
            sections.append(section)
            if section.failure is not None:
                bar.write(f"{step.name}: {section.failure}")
            bar.update()

    title = f"The paper's figures, again{' (quick)' if _QUICK.value else ''}"
    environment = reporting.environment()
    (out_dir / "report.md").write_text(markdown(title, sections, environment, out_dir))
    (out_dir / "report.html").write_text(html_page(title, sections, environment))
    reporting.write_json(
        out_dir,
        "results.json",
        {
            "flags": reporting.flag_values(_QUICK),
            "environment": environment,
            "summary": summary(sections),
            "claims": [
                {"experiment": s.step.name, "claim": c.what, "paper": c.paper, "here": c.ours,
                 "rule": c.rule, "verdict": c.verdict}
                for s in sections for c in s.claims
            ],
        },
    )  # fmt: skip
    reporting.print_table(
        title,
        ("experiment", "claim", "paper", "here", "verdict"),
        [(s.step.name, c.what, c.paper, c.ours, c.verdict) for s in sections for c in s.claims],
    )
    print(*(f"{count} {what}" for what, count in summary(sections).items()), sep=", ")
    print(f"report in {out_dir / 'report.html'} and {out_dir / 'report.md'}")
    if any(section.failure is not None for section in sections):
        sys.exit(1)


if __name__ == "__main__":
    reporting.run(main)
