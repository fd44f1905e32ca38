"""Runs an experiment in a process of its own; what has been run is not run again."""

import json
import resource
import subprocess
import time
from collections.abc import Callable
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
