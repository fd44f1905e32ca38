"""How much of the paper comes out again? Runs every experiment and writes one report.

    python -m experiments.paper.reproduce --quick
    python -m experiments.paper.reproduce
    python -m experiments.paper.reproduce --only=memory_waste,throughput
    python -m experiments.paper.reproduce --quick --mooncake=conversation.jsonl

Each experiment runs in a process of its own and leaves its results in a folder of --out_dir. Then
report.html (one file, with all plots) and report.md put the paper's figures beside the ones here,
with a verdict on each claim by a rule that is fixed beforehand: reproduced, differs, or not
comparable where this machine or model cannot decide it.

Started again, it runs only what failed, was interrupted, or was made by another version of the code
or other flags. On two CPU cores, expect less than 10 minutes with --quick and less than 2 hours
without. Exit code 1: an experiment failed; the report is written all the same.
"""

import importlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.lib import Options, option, reporting, run
from experiments.lib.claims import Claim
from experiments.lib.options import as_dict
from experiments.paper.report import Section, html_page, markdown, summary

# The plan. Experiments that decide most claims come first. Without --quick, simulations run in
# full, and real runs as far as two hours on two CPU cores allow.


@dataclass(frozen=True)
class Step:
    """One experiment, and its flags."""

    module: str  # in `experiments`
    title: str
    quick: str = "--quick"  # its flags with --quick
    full: str = ""  # and without
    remark: str = ""  # what a reader of its claims has to know
    more: tuple[str, ...] = ()  # flags with and without --quick
    alias: str = ""  # a name that says more than the module's

    @property
    def name(self) -> str:
        """Its name in the report and of its folder: the module's, without the figure's number."""
        return self.alias or re.sub(r"^fig\d+_", "", self.module.rpartition(".")[2])

    def command(self, config: "Config") -> list[str]:
        flags = [*(self.quick if config.quick else self.full).split(), *self.more]
        if config.seed:
            flags.append(f"--seed={config.seed}")
        flags.append(f"--out_dir={Path(config.out_dir) / self.name}")
        return [sys.executable, "-m", f"experiments.{self.module}", *flags]


LENGTHS = (
    "The paper publishes the means of its requests' lengths. The spread of ShareGPT's outputs, one "
    "number, is inferred from its figures 2 and 13 (sharegpt_served), so the contiguous systems of "
    "these two figures are no independent evidence of it; Alpaca's spread is assumed. Step times "
    "are those of a roofline model, which no figure was fitted to."
)
STEPS = (
    Step(
        "paper.fig01_capacity",
        "What fits in a GPU (table 1, Figure 1)",
        quick="--quick --duration_s=60 --systems=orca_oracle,paged",
    ),
    Step(
        "paper.fig02_memory_waste",
        "Where the KV memory goes (Figure 2)",
        quick="--quick --num_real_requests=16 --real_max_model_len=128 --real_pool=2",
        remark=LENGTHS,
    ),
    Step("paper.fig12_throughput", "Request rates sustained (Figure 12)", remark=LENGTHS),
    Step("paper.fig13_batched_requests", "Batch sizes (Figure 13)", remark=LENGTHS),
    Step("paper.fig14_parallel_and_beam", "Parallel sampling and beam search (Figure 14)"),
    Step(
        "paper.fig15_memory_sharing",
        "Memory saved by sharing (Figure 15)",
        quick="--quick --runs=simulated --widths=2,6 --num_requests=150",
        full="--num_real_requests=6 --max_real_tokens=128",
    ),
    Step(
        "paper.fig16_shared_prefix",
        "A shared prefix (Figure 16)",
        # Steps for few sequences: less to wait for where nothing is compiled yet.
        quick="--quick --max_num_seqs=8 --max_num_batched_tokens=64 --num_requests=8 --rounds=1 "
        "--output_tokens=8 --prefill_rounds=3",
        full="--num_requests=32 --rounds=3 --prefill_rounds=20",
    ),
    Step(
        "paper.fig17_chatbot",
        "A chatbot (Figure 17)",
        quick="--quick --num_conversations=2 --rounds=1 --max_turns=3",
        full="--num_conversations=4 --num_users=4 --rounds=1 --max_output_tokens=128",
    ),
    Step(
        "kernels.latency",
        "The attention kernel (Figure 18a)",
        quick="--context=64,256 --block_size=16",
        alias="kernel_latency",
    ),
    Step(
        "costs.decode_step",
        "A whole decode step, paged and contiguous",
        quick="--batch=8,32 --context=64 --rounds=5",
    ),
    Step(
        "paper.fig18_block_size",
        "Block sizes, end to end (Figure 18b)",
        quick="--quick --block_size=1,16,64,256 --duration_s=40 --real_block_size=16,64",
    ),
    Step(
        "paper.fig19_preemption",
        "Recompute or swap (Figure 19)",
        quick="--quick --runs=micro",
        full="--quick --block_sizes=1,4,16,32,64,256",
    ),
    Step(
        "costs.tail_latency",
        "Tail latency under load",
        quick="--quick --loads=1.5 --long_prompt=1024 --long_every=4 --num_requests=8 "
        "--short_output=24",
        full="--quick",
    ),
    Step("costs.length_shapes", "Uniform lengths hide what log-normal ones show"),
    Step(
        "simulator.validate",
        "The simulator beside the real engine",
        quick="--quick --num_requests=12",
        full="--quick --rounds=3",
        alias="validate_simulator",
    ),
)
# Runs where the user has a trace.
HIT_RATE = Step("costs.prefix_hit_rate", "Prefix hits of a Mooncake trace", quick="")


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    only: tuple[str, ...] = option((), f"Only these run: {', '.join(s.name for s in STEPS)}.")
    mooncake: str | None = option(None, "Mooncake trace (JSONL), which prefix_hit_rate needs.")
    fresh: bool = option(False, "Run again what has run already.")


def chosen_steps(names: Sequence[str], mooncake: str | None) -> list[Step]:
    """The steps of these names in order, all for no names; ValueError for an unknown name."""
    plan = [*STEPS]
    if mooncake is not None:
        plan.append(replace(HIT_RATE, more=(f"--trace={mooncake}",)))
    known = [step.name for step in plan]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no experiment {', '.join(unknown)}; there are {', '.join(known)}")
    return [step for step in plan if not names or step.name in names]


# Running an experiment, or keeping what an earlier run of it has left

DONE = "done.json"
LOG = "log.txt"
POLL_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a run of one experiment ended, as `DONE` keeps it."""

    command: list[str]
    commit: str | None
    seconds: float
    cpu_seconds: float  # of all its processes: what it takes on a machine that does more
    returncode: int
    last_line: str  # of the output
    was_kept: bool = False  # from an earlier run

    @property
    def succeeded(self) -> bool:
        return self.returncode == 0


def kept_outcome(folder: Path, command: list[str], commit: str | None) -> Outcome | None:
    """The outcome of an earlier run of the same command at the same commit, if it succeeded."""
    done = folder / DONE
    if not (done.is_file() and (folder / "results.json").is_file()):
        return None
    outcome = Outcome(**json.loads(done.read_text()))
    is_same = (outcome.command[1:], outcome.commit) == (command[1:], commit)
    return replace(outcome, was_kept=True) if is_same and outcome.succeeded else None


def run_command(
    command: list[str], folder: Path, commit: str | None, show: Callable[[str], None]
) -> Outcome:
    """Run a command, its output in `LOG`; `show` gets the last line from time to time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DONE).unlink(missing_ok=True)
    start, cpu_start = time.monotonic(), _cpu_seconds()
    with (folder / LOG).open("w") as log:
        unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}  # lines in the order of their printing
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=unbuffered)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                show(last_line(folder / LOG))
        except BaseException:
            process.terminate()
            process.wait()
            raise
    took = time.monotonic() - start, _cpu_seconds() - cpu_start
    outcome = Outcome(command, commit, *took, process.returncode, last_line(folder / LOG))
    (folder / DONE).write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    return outcome


def _cpu_seconds() -> float:
    """CPU time of the child processes that have ended, and of their own children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def last_line(log: Path) -> str:
    """The last line that is not blank; of a progress bar, its last state."""
    text = log.read_bytes()[-4096:].decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def run_step(step: Step, config: Config, commit: str | None, bar: "tqdm[Any]") -> Section:
    """Run an experiment, unless an earlier run is kept, and judge the paper's claims by it."""
    folder, command = Path(config.out_dir) / step.name, step.command(config)
    outcome = None if config.fresh else kept_outcome(folder, command, commit)
    if outcome is None:
        outcome = run_command(command, folder, commit, lambda line: bar.set_postfix_str(line[-60:]))
    claims: list[Claim] = []
    failure = None
    if outcome.succeeded:
        judge = importlib.import_module(f"experiments.{step.module}").claims
        claims = list(judge(json.loads((folder / "results.json").read_text())))
    else:
        failure = f"exit code {outcome.returncode}: {outcome.last_line}"
        bar.write(f"{step.name}: {failure}")
    ran = f"python {shlex.join(outcome.command[1:])}"
    took = f"{outcome.seconds:.0f} s ({outcome.cpu_seconds:.0f} s of CPU time)"
    took += ", kept from an earlier run" if outcome.was_kept else ""
    return Section(step.name, step.title, step.remark, folder, ran, took, failure, claims)


def main(config: Config) -> int:
    steps = chosen_steps(config.only, config.mooncake)
    out_dir = Path(config.out_dir)
    commit = reporting.git_commit(Path(__file__).parent)
    sections: list[Section] = []
    with tqdm(steps, unit="experiment") as bar:
        for step in bar:
            bar.set_description(step.name)
            sections.append(run_step(step, config, commit, bar))

    title = f"The paper's figures, again{' (quick)' if config.quick else ''}"
    environment = reporting.environment()
    (out_dir / "report.md").write_text(markdown(title, sections, environment, out_dir))
    (out_dir / "report.html").write_text(html_page(title, sections, environment))
    rows = [
        {
            "experiment": section.name,
            "claim": claim.what,
            "paper": claim.paper,
            "here": claim.ours,
            "rule": claim.rule,
            "verdict": claim.verdict,
        }
        for section in sections
        for claim in section.claims
    ]
    counts = summary(sections)
    results = {"flags": as_dict(config), "environment": environment, "summary": counts}
    reporting.write_json(out_dir, "results.json", results | {"claims": rows})
    reporting.print_rows(title, rows, ("experiment", "claim", "paper", "here", "verdict"))
    print(*(f"{count} {what}" for what, count in counts.items()), sep=", ")
    print(f"report in {out_dir / 'report.html'} and {out_dir / 'report.md'}")
    return int(any(section.failure is not None for section in sections))


if __name__ == "__main__":
    run(main, Config)
