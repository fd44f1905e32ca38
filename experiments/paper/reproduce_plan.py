"""What runs, in which order, and with which flags. Results first that decide most claims.

In full, what the paper gives figures of runs in full, and real runs as far as two hours on two CPU
cores allow; each experiment alone, without flags, takes longer.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DONE = "done.json"
LOG = "log.txt"
POLL_S = 0.5


@dataclass(frozen=True)
class Outcome:
    """How a run of one experiment ended."""

    command: list[str]
    commit: str | None
    seconds: float
    cpu_seconds: float  # of all its processes: what it takes on a machine that does more
    returncode: int
    last_line: str  # of what it printed
    was_kept: bool = False  # from an earlier run

    @property
    def succeeded(self) -> bool:
        return self.returncode == 0


def kept_outcome(folder: Path, command: list[str], commit: str | None) -> Outcome | None:
    """Of an earlier run of the same command at the same commit, if it succeeded."""
    done = folder / DONE
    if not (done.is_file() and (folder / "results.json").is_file()):
        return None
    outcome = Outcome(**json.loads(done.read_text()))
    is_same = (outcome.command[1:], outcome.commit) == (command[1:], commit)
    if not is_same or not outcome.succeeded:
        return None
    return Outcome(**asdict(outcome) | {"was_kept": True})


def run(
    command: list[str], folder: Path, commit: str | None, show: Callable[[str], None]
) -> Outcome:
    """Run it, its output in `LOG`; `show` gets the last line from time to time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DONE).unlink(missing_ok=True)
    start, cpu_start = time.monotonic(), _cpu_seconds()
    with (folder / LOG).open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                show(last_line(folder / LOG))
        except BaseException:
            process.terminate()
            process.wait()
            raise
    outcome = Outcome(
        command,
        commit,
        time.monotonic() - start,
        _cpu_seconds() - cpu_start,
        process.returncode,
        last_line(folder / LOG),
    )
    (folder / DONE).write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    return outcome


def _cpu_seconds() -> float:
    """Of the processes that have ended, their own children included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def last_line(log: Path) -> str:
    """The last one that is not blank; of a progress bar, its last state."""
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 4096))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def results_of(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


@dataclass(frozen=True)
class Step:
    """One experiment. `quick` and `full` are its flags; `plots` are files of its folder."""

    name: str  # of the module in `experiments`, and of the folder of its results
    title: str
    quick: tuple[str, ...]
    full: tuple[str, ...]
    plots: tuple[str, ...]
    remark: str = ""  # what a reader of its claims has to know

    def command(self, is_quick: bool, out_dir: str, more: Sequence[str] = ()) -> list[str]:
        arguments = self.quick if is_quick else self.full
        module = f"experiments.{self.name}"
        return [sys.executable, "-m", module, *arguments, *more, f"--out_dir={out_dir}"]


QUICK = ("--quick",)
LENGTHS = (
    "The paper publishes the means of its requests' lengths. The spread of ShareGPT's outputs, one "
    "number, is inferred from its figures 2 and 13 (sharegpt_served), so the contiguous systems of "
    "these two figures are no independent evidence of it; Alpaca's spread is assumed. Step times "
    "are those of a roofline model, which no figure was fitted to."
)
# Steps compiled for few sequences: less to wait for where nothing is compiled yet.
SMALL_REAL = ("--quick", "--max_num_seqs=8", "--max_num_batched_tokens=64")

STEPS = (
    Step(
        "capacity", "What fits in a GPU (table 1, Figure 1)",
        ("--quick", "--duration_s=60", "--systems=orca_oracle,paged"), (), ("capacity.png",),
    ),
    Step(
        "memory_waste", "Where the KV memory goes (Figure 2)",
        ("--quick", "--num_real_requests=16", "--real_max_model_len=128", "--real_pool=2"), (),
        ("memory_waste.png",),
        LENGTHS,
    ),
    Step(
        "throughput", "Request rates sustained (Figure 12)", QUICK, (), ("throughput.png",),
        LENGTHS,
    ),
    Step(
        "batched_requests", "Batch sizes (Figure 13)", QUICK, (), ("batched_requests.png",),
        LENGTHS,
    ),
    Step(
        "parallel_and_beam", "Parallel sampling and beam search (Figure 14)",
        QUICK, (), ("parallel_and_beam.png",),
    ),
    Step(
        "memory_sharing", "Memory saved by sharing (Figure 15)",
        ("--quick", "--runs=simulated", "--widths=2,6", "--num_requests=150"),
        ("--num_real_requests=6", "--max_real_tokens=128"), ("memory_sharing.png",),
    ),
    Step(
        "shared_prefix", "A shared prefix (Figure 16)",
        (*SMALL_REAL, "--num_requests=8", "--rounds=1", "--output_tokens=8",
         "--prefill_rounds=3"),
        ("--num_requests=32", "--rounds=3", "--prefill_rounds=20"), ("shared_prefix.png",),
    ),
    Step(
        "chatbot", "A chatbot (Figure 17)",
        ("--quick", "--num_conversations=2", "--rounds=1", "--max_turns=3"),
        ("--num_conversations=4", "--num_users=4", "--rounds=1", "--max_output_tokens=128"),
        ("chatbot.png",),
    ),
    Step("kernel_latency", "The attention kernel (Figure 18a)",
         ("--context=64,256", "--block_size=16"), (), ("latency.png",)),
    Step(
        "decode_step", "A whole decode step, paged and contiguous",
        ("--batch=8,32", "--context=64", "--rounds=5"), (), ("ratio.png",),
    ),
    Step(
        "block_size", "Block sizes, end to end (Figure 18b)",
        ("--quick", "--block_size=1,16,64,256", "--duration_s=40", "--real_block_size=16,64"),
        (), ("block_size.png",),
    ),
    Step(
        "preemption", "Recompute or swap (Figure 19)", ("--quick", "--runs=micro"),
        ("--quick", "--block_sizes=1,4,16,32,64,256"), ("preemption.png",),
    ),
    Step(
        "tail_latency", "Tail latency under load",
        ("--quick", "--loads=1.5", "--long_prompt=1024", "--long_every=4", "--num_requests=8",
         "--short_output=24"), QUICK,
        ("tail_latency.png",),
    ),
    Step(
        "length_shapes", "Uniform lengths hide what log-normal ones show",
        QUICK, (), ("length_shapes.png",),
    ),
    Step(
        "validate_simulator", "The simulator beside the real engine",
        ("--quick", "--num_requests=12"), ("--quick", "--rounds=3"), ("validate_simulator.png",),
    ),
)  # fmt: skip

# Needs a trace of the user's.
HIT_RATE = Step(
    "prefix_hit_rate", "Prefix hits of a Mooncake trace", (), (), ("prefix_hit_rate.png",)
)


def chosen_steps(names: Sequence[str], mooncake: str | None) -> list[tuple[Step, tuple[str, ...]]]:
    """(step, further flags) in order; all for no names. ValueError names those there are."""
    steps = [(step, ()) for step in STEPS]
    plan: list[tuple[Step, tuple[str, ...]]] = [*steps]
    if mooncake is not None:
        plan.append((HIT_RATE, (f"--trace={mooncake}",)))
    known = [step.name for step, _ in plan]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no experiment {', '.join(unknown)}; there are {', '.join(known)}")
    return [(step, more) for step, more in plan if not names or step.name in names]
