"""The command from end to end: tables, files, exit codes, and kernels that hang or crash."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from pallas_kernels.lab import aot, attention, ptx

HERE = Path(__file__).parent


class Run(NamedTuple):
    code: int
    stdout: str
    stderr: str
    rows: list[dict]
    results: dict


def kernel_check(out_dir: Path, *flags: str) -> Run:
    """Run the command, with the toys of the tests importable."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.kernels.check", f"--out_dir={out_dir}", *flags],
        cwd=HERE.parent.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    path = out_dir / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    return Run(done.returncode, done.stdout, done.stderr, results.get("cases", []), results)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Run:
    return kernel_check(
        tmp_path_factory.mktemp("good"), "--impl=xla", "--case=window", "--seed=5", "--workers=1"
    )


def test_a_kernel_without_fault_passes_with_exit_code_0(good):
    assert good.code == 0, good.stderr
    assert {row["verdict"] for row in good.rows} == {"pass"}
    assert good.results["faults"] == []


def test_every_case_that_was_asked_for_is_a_row(good):
    assert [row["case"] for row in good.rows] == [
        spec.name for spec in attention.VALUE_SPECS if "window" in spec.name
    ]
    for row in good.rows:
        assert row["implementation"] == "xla"
        assert row["where"] == "CPU"
        assert 0 < row["error"] < row["tolerance"]
        assert row["dtype"] == "bfloat16"
        assert row["shape"].startswith(("B4 T1 ", "B6 T"))


def test_the_table_the_seed_and_a_csv_are_left(good):
    for text in ("xla: values on CPU", "window and cap", "tolerance", "--seed=5", "xla: 3 pass"):
        assert text in good.stdout
    assert good.results["seed"] == 5
    with open(Path(good.results["flags"]["out_dir"]) / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows] == [row["case"] for row in good.rows]
    assert float(rows[0]["error"]) == good.rows[0]["error"]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory) -> Run:
    """Kernels that hang, crash, refuse and err; the time is enough for all but the first."""
    return kernel_check(
        tmp_path_factory.mktemp("faulty"),
        "--impl=toys.hanging,toys.crashing,toys.refusing,toys.forgetful,toys.racing",
        "--case=MQA",
        "--checks=values",
        "--timeout_s=15",
    )


@pytest.mark.parametrize(
    ("impl", "verdict", "reason"),
    [
        ("toys.hanging", "hung", "no result in 15 s"),
        ("toys.crashing", "crashed", "the process ended with signal SIGABRT"),
        ("toys.refusing", "refused", "heads of 128 are out of fashion"),
        ("toys.forgetful", "wrong", "must be"),
        ("toys.racing", "race", "gather.py"),
    ],
)
def test_each_faulty_kernel_is_one_row_with_its_verdict(faulty, impl, verdict, reason):
    [row] = [row for row in faulty.rows if row["implementation"] == impl]
    assert row["verdict"] == verdict
    assert reason in row["reason"]


def test_faults_end_in_exit_code_1_and_are_told(faulty):
    assert faulty.code == 1
    for text in ("toys.hanging, MQA, repeated blocks, CPU: hung", "a failed assertion", "refused:"):
        assert text in faulty.stdout
    faults = [fault["fault"] for fault in faulty.results["faults"]]
    assert len(faults) == 5


def test_a_kernel_that_refuses_everything_has_not_been_checked(faulty):
    fault = "toys.refusing: every case is refused, so nothing was checked"
    assert fault in [fault["fault"] for fault in faulty.results["faults"]]


def test_lowering_has_a_row_for_each_gpu(tmp_path):
    run = kernel_check(
        tmp_path, "--op=kv_write", "--impl=mosaic_gpu", "--case=SmolLM2", "--target=L4,H200"
    )
    assert run.code == 0, run.stdout
    assert [(row["check"], row["where"]) for row in run.rows] == [
        ("lowering", "L4"),
        ("lowering", "H200"),
    ]
    for row in run.rows:
        assert row["kernels"] == 1
        if aot.is_available():
            assert row["registers"] > 0
            assert row["spills"] == 0
            assert 0 < row["occupancy"] <= 1
            assert all(row[name] >= 0 for name in ptx.INSTRUCTIONS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--impl=toys.nowhere"], "cannot import the implementation toys.nowhere"),
        (["--impl=xla", "--case=nothing"], "no case has 'nothing' in its name; there are GQA"),
        (["--impl=xla", "--target=A100,V100"], "--target takes A100, L4, H200, B200; got 'V100'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, flags, message):
    run = kernel_check(tmp_path / "out", *flags)
    assert run.code == 2
    last_line = run.stderr.splitlines()[-1]  # JAX may have had something to say before
    assert last_line.startswith("error: ")
    assert message in last_line
    assert "Traceback" not in run.stderr
    assert not run.rows
