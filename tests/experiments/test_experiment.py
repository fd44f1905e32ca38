"""How an experiment runs: exit codes, errors, and a grid that goes on after an interruption."""

import dataclasses
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.lib import experiment
from experiments.lib.experiment import grid
from experiments.lib.options import Options, option

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = '''
"""Does nothing much."""
import os
import time
from dataclasses import dataclass
from typing import NamedTuple

from experiments.lib.experiment import grid, run
from experiments.lib.options import SimulationOptions, option
from experiments.lib.reporting import report

@dataclass(frozen=True, kw_only=True)
class Config(SimulationOptions):
    count: int = option(1, "It counts so far.", least=0)
    points: tuple[str, ...] = option((), "Points are these.")

class Row(NamedTuple):
    name: str
    process: int

def measure(name: str) -> Row:
    print("measured", name, flush=True)
    if name == "fault":
        time.sleep(float(os.environ.get("FAULT_AFTER_S", 0)))
        raise KeyError("a fault")
    if name == "slow":
        time.sleep(300)
    return Row(name, os.getpid())

def main(config: Config) -> int | None:
    if config.count > 9:
        raise ValueError(f"count {config.count} is\\n too large")
    if config.count > 8:
        raise KeyError("a fault")
    print("count", config.count)
    if config.points:
        rows = grid(measure, config.points, config, unit="point", processes=config.processes)
        print(*(row.name for row in rows), len({row.process for row in rows}))
        print(os.getpid() in {row.process for row in rows})
    if config.count == 7:
        return 3

if __name__ == "__main__":
    run(main, Config)
'''


@pytest.fixture
def run_script(tmp_path):
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "fig99_script.py"
        path.write_text(SCRIPT)
        return subprocess.run(
            [sys.executable, path, *arguments],
            env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


# Flags and exit codes


def test_an_experiment_gets_its_options_and_a_folder(run_script, tmp_path):
    result = run_script("--count=3")
    expected = "count 3\nResults are in out/script\n"  # the figure's number is left out
    assert (result.returncode, result.stdout) == (0, expected)
    assert (tmp_path / "out" / "script").is_dir()


def test_help_shows_the_flags_and_succeeds(run_script):
    result = run_script("--help")
    assert result.returncode == 0
    assert "Does nothing much." in result.stdout
    assert "It counts so far." in result.stdout
    assert "Seed of everything" in result.stdout


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--count=10", "error: count 10 is too large\n"),
        ("--count=-1", "error: flag --count=-1: -1 is not a non-negative integer"),
        ("--count=x", "error: flag --count=x: invalid literal"),
        ("--points=", "error: --points takes one value at least"),
        ("--cuont=1", "error: Unknown command line flag 'cuont'. Did you mean: count ?"),
        ("surplus", "error: unexpected argument 'surplus'"),
        ("--out_dir=fig99_script.py/out", "error: cannot make the folder fig99_script.py/out"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run_script, argument, line):
    result = run_script(argument)
    assert result.returncode == 2
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_the_traceback_of_bad_input_is_there_with_more_verbosity(run_script):
    result = run_script("--count=10", "--verbosity=1")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


def test_faults_keep_their_traceback(run_script):
    result = run_script("--count=9")
    assert result.returncode == 1
    assert "KeyError: 'a fault'" in result.stderr


def test_the_exit_code_is_what_main_returns(run_script):
    result = run_script("--count=7")
    assert result.returncode == 3
    assert result.stdout.endswith("Results are in out/script\n")


# A grid in several processes


def test_points_are_measured_in_processes_and_come_back_in_order(run_script, tmp_path):
    result = run_script("--points=a,b,c,d", "--processes=2")
    assert result.returncode == 0, result.stderr
    assert sorted(line for line in result.stdout.splitlines() if "measured" in line) == [
        *("measured a", "measured b", "measured c", "measured d")
    ]
    assert "a b c d " in result.stdout
    assert "False\n" in result.stdout  # none in the process that started
    assert not list(tmp_path.rglob("points.pickle"))  # it has ended, so nothing is kept


def test_a_fault_ends_the_run_at_once_and_what_is_done_is_kept(run_script):
    start = time.monotonic()
    result = run_script("--points=a,fault,slow,b", "--processes=2", FAULT_AFTER_S="5")
    assert time.monotonic() - start < 60  # not the minutes of the slow point
    assert result.returncode == 1
    assert "KeyError: 'a fault'" in result.stderr
    again = run_script("--points=a,fault,slow,b", "--processes=1")
    assert again.returncode == 1
    assert "measured a" not in again.stdout
    assert "measured fault" in again.stdout


# Points that are done


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    size: int = option(1, "Each has this size.")
    processes: int | None = option(None, "So many processes measure.")


class Interrupted(Exception):
    pass


class Measured:
    """Measures letters, and notes which; `faulty` ones raise. No pickle takes it, as an engine."""

    def __init__(self) -> None:
        self.points: list[str] = []
        self.faulty: set[str] = set()
        self.engine = threading.Lock()

    def measure(self, point: str) -> tuple[str, int]:
        if point in self.faulty:
            raise Interrupted
        self.points.append(point)
        return point, len(self.points)

    def grid(self, points: str, config: Config) -> list[tuple[str, int]]:
        return grid(self.measure, points, config, unit="letter")

    def interrupted_at(self, point: str, points: str, config: Config) -> None:
        self.faulty = {point}
        with pytest.raises(Interrupted):
            self.grid(points, config)
        self.faulty = set()


@pytest.fixture
def measured() -> Measured:
    return Measured()


@pytest.fixture
def config(tmp_path) -> Config:
    return Config(out_dir=str(tmp_path))


def test_rows_are_in_the_order_of_the_points(measured, config):
    assert measured.grid("cab", config) == [("c", 1), ("a", 2), ("b", 3)]


def test_after_an_interruption_only_what_is_missing_is_measured(measured, config):
    measured.interrupted_at("c", "abcd", config)
    assert measured.points == ["a", "b"]
    rows = measured.grid("abcd", config)
    assert measured.points == ["a", "b", "c", "d"]
    assert rows == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]


def test_two_grids_of_an_experiment_keep_what_each_has_done(measured, config):
    measured.grid("ab", config)
    measured.interrupted_at("d", "cde", config)
    measured.grid("ab", config)
    measured.grid("cde", config)
    assert measured.points == ["a", "b", "c", "d", "e"]


def test_the_folder_and_the_processes_change_no_row(measured, config, tmp_path):
    measured.interrupted_at("b", "ab", config)
    other = tmp_path / "moved"
    other.mkdir()
    (tmp_path / "points.pickle").rename(other / "points.pickle")
    changed = dataclasses.replace(config, processes=4, out_dir=str(other))
    measured.grid("ab", changed)
    assert measured.points == ["a", "b"]


def test_other_options_measure_all_again(measured, config):
    measured.interrupted_at("c", "abc", config)
    measured.grid("abc", dataclasses.replace(config, size=2))
    assert measured.points == ["a", "b", "a", "b", "c"]


@pytest.mark.parametrize("changed", ["code", "machine"])
def test_other_code_or_another_machine_measures_all_again(measured, config, monkeypatch, changed):
    measured.interrupted_at("c", "abc", config)
    if changed == "code":
        monkeypatch.setattr(experiment, "_code", lambda: b"other sources")
    else:
        facts = experiment.reporting.environment()
        other = facts | {"device_kind": "NVIDIA H100"}
        monkeypatch.setattr(experiment.reporting, "environment", lambda: other)
    measured.grid("abc", config)
    assert measured.points == ["a", "b", "a", "b", "c"]


def test_the_code_is_that_of_the_script_too(monkeypatch, tmp_path):
    script = tmp_path / "ablation.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    digests = set()
    for text in ("a = 1", "a = 2"):
        script.write_text(text)
        experiment._code.cache_clear()
        digests.add(experiment._code())
    experiment._code.cache_clear()
    assert len(digests) == 2


def test_a_row_that_was_cut_off_is_measured_again_and_the_file_goes_on(measured, config):
    store = Path(config.out_dir) / "points.pickle"
    measured.interrupted_at("c", "abcd", config)
    store.write_bytes(store.read_bytes()[:-5])  # of "b"
    measured.interrupted_at("d", "abcd", config)
    assert measured.points == ["a", "b", "b", "c"]
    measured.grid("abcd", config)
    assert measured.points == ["a", "b", "b", "c", "d"]


def test_equal_points_are_measured_each(measured, config):
    measured.interrupted_at("b", "aaab", config)
    assert measured.grid("aaab", config) == [("a", 1), ("a", 2), ("a", 3), ("b", 4)]
