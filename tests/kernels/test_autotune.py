"""The search for a tuning: what it tries, what it keeps, what it writes."""

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from experiments.kernels import autotune as search
from pallas_kernels.paged_attention.mosaic_gpu.tuning import Tuning
from pallas_kernels.paged_attention.triton import TritonTuning

ROOT = Path(__file__).parents[2]
START = Tuning(block_kv=64, kv_heads=1, num_stages=2, query_columns=8, num_splits=1)


def test_a_group_is_varied_in_every_combination_that_the_tuning_takes():
    tried = list(search.neighbours(START, ["block_kv", "num_stages"]))
    assert len(tried) == len(set(tried)) == 5 * 5
    assert {(t.kv_heads, t.query_columns, t.num_splits) for t in tried} == {(1, 8, 1)}
    with_warps = search.neighbours(TritonTuning(64, 16), search.GROUPS[1])
    assert {(t.num_stages, t.num_warps) for t in with_warps} >= {(2, 2), (8, 8)}


def test_every_parameter_of_a_tuning_is_in_one_group_and_has_choices():
    grouped = [name for group in search.GROUPS for name in group]
    assert len(grouped) == len(set(grouped))
    for tuning in (Tuning, TritonTuning):
        assert {field.name for field in dataclasses.fields(tuning)} <= set(grouped)
    assert set(grouped) == set(search.CHOICES)


def test_the_search_finds_an_optimum_that_groups_reach_one_after_the_other():
    goal = Tuning(block_kv=32, kv_heads=4, num_stages=4, query_columns=16, num_splits=8)
    measured = []

    def seconds(tuning: Tuning) -> float:
        measured.append(tuning)
        pairs = zip(dataclasses.astuple(tuning), dataclasses.astuple(goal), strict=True)
        return 1 + sum(abs(math.log2(mine / best)) for mine, best in pairs)

    assert search.search(START, seconds) == goal
    assert len(measured) == len(set(measured)), "nothing is measured twice"


def test_the_start_stays_where_nothing_else_does():
    assert search.search(START, lambda tuning: 1.0 if tuning == START else math.inf) == START


@dataclass(frozen=True)
class Picky:
    """A tuning that refuses some combinations."""

    block_kv: int = 64
    num_stages: int = 2

    def __post_init__(self) -> None:
        if self.block_kv > 64:
            raise ValueError(f"block_kv must be at most 64, got {self.block_kv}")


def test_combinations_that_a_tuning_refuses_are_not_tried():
    tried = search.neighbours(Picky(), ["block_kv"])
    assert [tuning.block_kv for tuning in tried] == [16, 32, 64]


def test_an_entry_joins_the_others_and_reads_as_a_tuning(tmp_path):
    path = tmp_path / "table.json"
    search.write_entry(path, "H200 b", dataclasses.asdict(START))
    search.write_entry(path, "A100 a", {"block_kv": 8})
    search.write_entry(path, "A100 a", dataclasses.asdict(START))
    table = json.loads(path.read_text())
    assert list(table) == ["A100 a", "H200 b"]
    assert all(Tuning(**entry) == START for entry in table.values())


def test_the_packaged_table_is_the_one_that_kernels_read():
    assert search.TABLE.exists()
    for entry in json.loads(search.TABLE.read_text()).values():
        Tuning(**entry)


def run(out_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "experiments.kernels.autotune",
        f"--out_dir={out_dir}",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


needs_no_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="for a CPU")


@needs_no_gpu
def test_without_a_gpu_nothing_is_guessed(tmp_path):
    result = run(tmp_path)
    assert result.returncode == 2
    assert "error: no GPU here, and how fast a kernel is can only be measured on one" in (
        result.stderr
    )


def test_a_kernel_without_tuning_is_refused(tmp_path):
    result = run(tmp_path, "--impl=xla")
    assert result.returncode == 2
    assert "error: attention 'xla' has nothing to tune" in result.stderr


@pytest.mark.slow  # a whole experiment
@needs_no_gpu
def test_a_dry_run_measures_candidates_in_the_interpreter_and_writes_no_entry(tmp_path):
    table = tmp_path / "table.json"
    result = run(
        tmp_path / "out",
        *("--dry_run", "--impl=triton", "--geometry=2/1/16", "--batch=1", "--context=16"),
        *("--seconds=0", "--time_limit_s=1", f"--table={table}"),
    )
    assert result.returncode == 0, result.stderr
    assert "no entry written" in result.stdout
    assert not table.exists()
    rows = [json.loads(line) for line in (tmp_path / "out" / "candidates.jsonl").open()]
    assert rows[0]["verdict"] == "right"
    assert rows[0]["time_us"] > 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["cases"] == rows
    assert results["best"]["block_rows"] == 16
