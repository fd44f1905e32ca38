"""The check for a lent GPU: what it runs first, what it leaves on disk, what a fault costs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from experiments.kernels import gpu_check
from experiments.kernels import gpu_check as runner
from experiments.kernels import gpu_plan as plan
from experiments.kernels.gpu_check import Report, goals
from experiments.kernels.gpu_plan import LatencyCheck, Settings, ValueCheck, ValueRow, is_fault
from experiments.kernels.measure import Row, empty_row
from pallas_kernels.lab.checks import OPS, CheckResult, lab_of
from pallas_kernels.lab.worker import Outcome
from pallas_kernels.paged_attention import IMPLEMENTATIONS

ROOT = Path(__file__).parents[2]
SETTINGS = Settings("NVIDIA H200", copy_gb_per_s=4000, seconds=0.1, interpret=False, seed=7)
FIRST = plan.FIRST_SPECS[0]

# Order


def test_every_kernel_is_checked_before_any_is_timed_and_targets_come_first():
    checks = plan.chosen(plan.full_plan(), None)
    kinds = [type(check) for check in checks]
    first_timed = kinds.index(LatencyCheck)
    attention = [check for check in checks[:first_timed] if check.op == "attention"]
    assert {check.implementation for check in attention} == set(IMPLEMENTATIONS)
    assert {check.spec for check in attention} == set(plan.FIRST_SPECS)
    timed = [check for check in checks if isinstance(check, LatencyCheck)]
    count = len(plan.EVERYTHING)
    assert [check.shape for check in timed[:count]] == [plan.FULL_BATCH] * count
    assert [check.shape for check in timed[count : 2 * count]] == [plan.LONG_CONTEXT] * count
    prefills = timed[2 * count : 2 * count + 2 * len(plan.PREFILLING)]
    assert {check.shape for check in prefills} == set(plan.PREFILLS)


def test_the_plan_has_each_check_once_and_all_that_was_asked_for():
    checks = plan.chosen(plan.full_plan(), None)
    assert len(checks) == len(set(checks))
    timed = {
        (str(check.shape.geometry), check.shape.batch, check.shape.context, check.implementation)
        for check in checks
        if isinstance(check, LatencyCheck)
    }
    for geometry in ("llama3-8b", "opt-13b", "smollm2"):
        for batch in (1, 8, 64, 256):
            for context in (512, 4096, 32768):
                assert {(geometry, batch, context, name) for name in plan.EVERYTHING} <= timed
    values = {check for check in checks if isinstance(check, ValueCheck)}
    for spec in lab_of("attention").VALUE_SPECS:
        for name in IMPLEMENTATIONS:
            assert ValueCheck("attention", name, spec) in values


def test_only_the_named_implementations_are_run():
    checks = plan.chosen(plan.small_plan(), ["xla"])
    assert {check.implementation for check in checks} == {"xla"}
    assert {type(check) for check in checks} == {ValueCheck, LatencyCheck}


# Running


class FakeWorker:
    """Answers calls from a list; how often it was closed."""

    def __init__(self, outcomes):
        self.outcomes, self.calls, self.closed = list(outcomes), [], 0

    def call(self, function, args, timeout_s):
        self.calls.append((function, args, timeout_s))
        return self.outcomes.pop(0)

    def close(self):
        self.closed += 1


def value_check(name: str) -> ValueCheck:
    return ValueCheck("attention", name, FIRST)


PASS = Outcome("returned", CheckResult("pass", error=0.1, tolerance=0.2))
WRONG = Outcome("returned", CheckResult("wrong", "out is 1, must be 2"))
HUNG = Outcome("hung", reason="no result in 40 s")


def run(tmp_path, checks, outcomes, seconds: float = 1000.0) -> tuple[Report, FakeWorker]:
    worker, report = FakeWorker(outcomes), Report(tmp_path)
    deadline = time.monotonic() + seconds
    runner.run_checks(checks, worker, report, SETTINGS, deadline=deadline, limit_s=40)
    return report, worker


def test_a_check_that_hangs_costs_its_own_result_alone(tmp_path):
    checks = [value_check("triton"), value_check("xla")]
    report, worker = run(tmp_path, checks, [HUNG, PASS])
    assert [row.verdict for row in report.values] == ["hung: no result in 40 s", "pass"]
    assert worker.closed == 1
    assert report.faults() == [(f"attention triton, {FIRST.name}", "hung: no result in 40 s")]
    assert json.loads((tmp_path / "results.json").read_text())["values"][1]["error"] == 0.1


def test_wrong_values_are_a_fault_but_leave_the_process_alone(tmp_path):
    report, worker = run(tmp_path, [value_check("triton")], [WRONG])
    assert report.faults() == [(f"attention triton, {FIRST.name}", "wrong: out is 1, must be 2")]
    assert worker.closed == 0


def test_a_fault_of_the_device_ends_its_process_and_one_of_python_does_not(tmp_path):
    for fault, closed in (("ValueError: no such layout", 0), ("JaxRuntimeError: INTERNAL", 1)):
        failed = Outcome("returned", CheckResult("failed", fault))
        _, worker = run(tmp_path, [value_check("triton")], [failed])
        assert worker.closed == closed


def test_an_implementation_that_costs_three_processes_is_left_out(tmp_path):
    checks = [value_check("triton")] * 4 + [value_check("xla")]
    report, worker = run(tmp_path, checks, [HUNG, HUNG, HUNG, PASS])
    assert worker.closed == 3
    assert report.values[-1].implementation == "xla"
    assert report.not_run == [
        f"attention triton, values: {FIRST.name} (triton cost 3 processes before)",
    ]


def test_at_the_time_limit_what_is_left_is_listed(tmp_path):
    report, worker = run(tmp_path, [value_check("xla")] * 2, [], seconds=runner.LEAST_S - 1)
    assert report.not_run == [f"attention xla, values: {FIRST.name}"] * 2
    assert worker.calls == []


def test_a_check_gets_no_more_time_than_is_left(tmp_path):
    _, worker = run(tmp_path, [value_check("xla")], [PASS], seconds=20)
    assert worker.calls[0][2] <= 20
    assert worker.calls[0][:2] == (
        "pallas_kernels.lab.checks:check_random_values",
        ("xla", FIRST, 7, False, "attention"),
    )


def test_tracebacks_are_kept(tmp_path):
    failed = Outcome("returned", CheckResult("failed", "KeyError: 1", "Traceback: line 5"))
    crashed = Outcome("crashed", reason="exit code 1", details="CUDA_ERROR_ILLEGAL_ADDRESS")
    run(tmp_path, [value_check("triton"), value_check("xla")], [failed, crashed])
    log = (tmp_path / "faults.log").read_text()
    assert "Traceback: line 5" in log
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in log


def test_every_op_of_the_lab_gives_rows():
    checks = plan.chosen(plan.full_plan(), None)
    values = [check for check in checks if isinstance(check, ValueCheck)]
    assert {check.op for check in values} == set(OPS)
    for check in values:
        row = check.row(PASS, SETTINGS)
        assert (row.op, row.implementation, row.verdict) == (check.op, check.implementation, "pass")


# The report


def latency_row(name: str, shape=plan.FULL_BATCH, **figures) -> Row:
    return empty_row(name, shape, "NVIDIA H200", "right")._replace(**figures)


def test_a_latency_check_that_crashed_is_a_row_that_says_so():
    check = LatencyCheck("mosaic_gpu", plan.FULL_BATCH)
    row = check.row(Outcome("crashed", reason="exit code 134"), SETTINGS)
    assert (row.verdict, row.time_us, row.device) == ("crashed: exit code 134", None, "NVIDIA H200")
    measured = latency_row("mosaic_gpu", time_us=1.0)
    assert check.row(Outcome("returned", measured), SETTINGS) is measured
    name, args = check.call(SETTINGS)
    assert name == "experiments.kernels.measure:measure"
    assert args == ("mosaic_gpu", plan.FULL_BATCH, 4000, 0.1, False)


def test_goals_compare_the_rows_of_their_shape():
    rows = [
        latency_row("mosaic_gpu", time_us=100.0, copy_fraction=0.9),
        latency_row("mosaic_gpu", plan.LONG_CONTEXT, time_us=50.0, copy_fraction=0.5),
        latency_row("contiguous", time_us=98.0),
        latency_row("jax_paged", time_us=150.0),
        latency_row("cudnn_paged", time_us=90.0),
    ]
    ours = [goal for goal in goals(rows) if goal.kernel == "mosaic_gpu"]
    assert [goal.measured for goal in ours] == [0.9, 0.5, 100 / 98, 1.5, 100 / 90]
    assert [goal.met for goal in ours] == [True, False, True, True, False]
    others = [goal for goal in goals(rows) if goal.kernel != "mosaic_gpu"]
    assert all(goal.measured is None and goal.met is None for goal in others)


def test_the_files_are_whole_after_every_row(tmp_path):
    report = Report(tmp_path, {"device_kind": "NVIDIA H200", "copy_gb_per_s": 4000.0})
    report.write()
    report.add(latency_row("contiguous", time_us=10.0), "")
    report.add(latency_row("mosaic_gpu", time_us=11.0, copy_fraction=0.9), "")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["state"] == "not finished"
    assert [row["ratio"] for row in results["latency"]] == [1.0, 1.1]
    assert results["goals"][0]["measured"] == 0.9
    table = (tmp_path / "table.md").read_text()
    assert table.startswith("NVIDIA H200, JAX None, copy bandwidth 4,000 GB/s")
    assert "### llama3-8b, bfloat16, decode, NVIDIA H200" in table
    assert "| mosaic_gpu | 64 | 4,096 | 16 |" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "table.md"]


def test_values_are_summed_up_by_implementation(tmp_path):
    report = Report(tmp_path)
    for verdict, error in (("pass", 0.1), ("refused: no", None), ("wrong: NaN", None)):
        row = ValueRow("attention", "xla", "GQA", "B6", "bfloat16", "cpu", error, 0.2, 1.0, verdict)
        report.add(row, "")
    (row,) = report.tables()["Values against float64"]
    assert list(row.values()) == ["attention", "xla", 1, 1, 1, 0.5]


@pytest.mark.parametrize(
    ("verdict", "fault"),
    [("right", False), ("pass", False), ("refused: x", False), ("skipped: x", False)]
    + [(verdict, True) for verdict in ("wrong: x", "failed: x", "hung: x", "crashed: x", "race")],
)
def test_verdicts_that_are_faults(verdict, fault):
    assert is_fault(verdict) == fault


# compute-sanitizer


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ("check: pass\n========= ERROR SUMMARY: 0 errors", "pass"),
        ("check: pass\n========= ERROR SUMMARY: 3 errors", "wrong: 3 errors"),
        (
            "check: pass\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)",
            "wrong: 2 hazards displayed (2 errors, 0 warnings)",
        ),
        (
            "check: pass\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
            "pass",
        ),
        ("check: wrong\n= ERROR SUMMARY: 0 errors", "failed: the check did not pass under it"),
        ("Device not supported", "skipped: it does not work here: Device not supported"),
    ],
)
def test_the_sanitizers_summary_is_the_verdict(output, verdict):
    assert gpu_check.sanitizer_verdict(output) == verdict


def test_the_sanitizer_is_run_over_a_check_and_stopped_in_time(tmp_path):
    command = tmp_path / "compute-sanitizer"
    command.write_text('#!/bin/sh\nshift 8\n"$@"\necho "ERROR SUMMARY: 0 errors"\n')
    command.chmod(0o755)
    assert gpu_check.sanitize(str(command), "memcheck", "xla", FIRST.name, 60)["verdict"] == "pass"
    command.write_text("#!/bin/sh\nexec sleep 60\n")
    row = gpu_check.sanitize(str(command), "memcheck", "xla", FIRST.name, 0.1)
    assert row["verdict"] == "skipped: it took more than 0 s"


# The script

MISSING = ("flax", "gguf", "optax", "safetensors", "tokenizers", "transformers", "jinja2")


@pytest.mark.parametrize(
    "work",
    [
        "import experiments.kernels.autotune",
        "import experiments.kernels.latency",
        "from experiments.kernels.gpu_check import gpu_plan; "
        "assert gpu_plan.chosen(gpu_plan.full_plan(), None)",
        "import experiments.kernels.measure",
    ],
)
def test_a_bare_jax_is_enough_and_the_device_is_left_to_the_worker(work):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({MISSING})); {work}; "
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def script(out_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", f"--out_dir={out_dir}", *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=out_dir,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow  # a whole experiment
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for a CPU")
def test_a_dry_run_leaves_the_files_of_a_run(tmp_path):
    result = script(tmp_path, "--dry_run", "--impl=xla,xla_contiguous,contiguous", "--seconds=0")
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["state"] == "finished"
    assert results["not_run"] == []
    assert results["device_platform"] == "cpu"
    assert [row["verdict"] for row in results["values"]] == ["pass"] * len(plan.FIRST_SPECS)
    assert f"attention xla, values: {FIRST.name}: pass" in result.stdout
    assert {row["implementation"] for row in results["latency"]} >= {"xla", "xla_contiguous"}
    assert "finished; 0 faults" in (tmp_path / "table.md").read_text()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for a CPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path):
    result = script(tmp_path)
    assert result.returncode == 2
    assert "error: JAX's device is a cpu; --dry_run is for a CPU" in result.stderr
