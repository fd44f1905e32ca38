"""Calls in processes of their own: whatever becomes of one, the others go on."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pallas_kernels.lab.worker import Worker, run_all, run_isolated

ROOT = Path(__file__).resolve().parents[2]
CALLS = "tests.kernels.toys.calls"
# Timeout of calls that end by themselves; long, for a busy machine.
AMPLE_S = 60


def is_alive(pid: int) -> bool:
    """A process that runs; one that has ended and waits for its parent does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + AMPLE_S
    while not condition():
        assert time.monotonic() < deadline, f"still waiting until {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def worker():
    with Worker() as worker:
        yield worker


def test_a_call_returns_its_value(worker):
    outcome = worker.call(f"{CALLS}:add", (2, 3), AMPLE_S)
    assert (outcome.status, outcome.value) == ("returned", 5)
    assert 0 <= outcome.seconds < AMPLE_S


def test_calls_share_a_process(worker):
    first, second = (worker.call(f"{CALLS}:process", (), AMPLE_S).value for _ in range(2))
    assert first == second != os.getpid()


def test_an_exception_is_told_with_its_traceback_and_leaves_the_process(worker):
    before = worker.call(f"{CALLS}:process", (), AMPLE_S).value
    outcome = worker.call(f"{CALLS}:fail", ("no such thing",), AMPLE_S)
    assert (outcome.status, outcome.reason) == ("raised", "KeyError: 'no such thing'")
    assert "in fail" in outcome.details
    assert worker.call(f"{CALLS}:process", (), AMPLE_S).value == before


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [("die", (), "signal SIGSEGV"), ("leave", (3,), "exit code 3")],
)
def test_a_process_that_ends_is_told_with_its_last_words_and_replaced(
    worker, function, args, reason
):
    outcome = worker.call(f"{CALLS}:{function}", args, AMPLE_S)
    assert outcome.status == "crashed"
    assert outcome.reason == f"the process ended with {reason}"
    if function == "die":
        assert "the last words" in outcome.details
    assert worker.call(f"{CALLS}:add", (1, 1), AMPLE_S).value == 2


def test_a_call_that_hangs_is_killed_with_all_it_started_and_replaced(worker, tmp_path):
    pids = tmp_path / "pids"
    outcome = worker.call(f"{CALLS}:wait_forever", (str(pids),), 1.0)
    assert (outcome.status, outcome.reason) == ("hung", "no result in 1 s")
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} ends")
    assert worker.call(f"{CALLS}:add", (1, 1), AMPLE_S).value == 2


def test_one_isolated_call():
    assert run_isolated(f"{CALLS}:add", (1, 2), AMPLE_S).value == 3


def test_calls_in_parallel_all_end_whatever_some_of_them_do(tmp_path):
    calls = [
        (f"{CALLS}:add", (1, 1)),
        (f"{CALLS}:wait_forever", (str(tmp_path / "pids"),)),
        (f"{CALLS}:die", ()),
        (f"{CALLS}:add", (2, 2)),
    ]
    outcomes = dict(run_all(calls, 2.0, num_workers=2))
    assert [outcomes[i].status for i in range(4)] == ["returned", "hung", "crashed", "returned"]
    assert outcomes[3].value == 4


def test_leaving_early_stops_what_runs(tmp_path):
    pids = tmp_path / "pids"
    calls = [
        (f"{CALLS}:wait_forever", (str(pids),)),
        (f"{CALLS}:add", (1, 1)),
        (f"{CALLS}:wait_forever", (str(tmp_path / "never"),)),
    ]
    ended = run_all(calls, AMPLE_S, num_workers=2)
    assert next(ended)[0] == 1
    wait_until(lambda: pids.exists() and pids.read_text(), "the call has begun")
    ended.close()
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} ends")


def test_a_worker_ends_with_the_process_that_started_it(tmp_path):
    pids = tmp_path / "pids"
    script = (
        "from pallas_kernels.lab.worker import run_isolated\n"
        f"run_isolated('{CALLS}:wait_forever', ({str(pids)!r},), {AMPLE_S})\n"
    )
    path = os.pathsep.join([str(ROOT), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        wait_until(lambda: pids.exists() and pids.read_text(), "the call has begun")
    finally:
        parent.kill()
        parent.wait()
    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} ends")


def test_environment_variables_are_for_the_workers_alone():
    [(_, outcome)] = run_all(
        [("os:getenv", ("A_VARIABLE",))], AMPLE_S, num_workers=1, env={"A_VARIABLE": "x"}
    )
    assert outcome.value == "x"
    assert os.getenv("A_VARIABLE") is None
