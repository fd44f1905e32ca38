"""Calls in processes of their own: a kernel that waits forever can be stopped in no other way.

A worker is used for one call after the other, so that JAX is imported once. When a call hangs or
takes its process down, that is its result, and the worker gets a new process for the next one.
"""

import contextlib
import importlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal

# A process starts and imports JAX in this time, on a busy machine too.
START_TIMEOUT_S = 120.0
CRASH_LINES = 5


@dataclass(frozen=True)
class Outcome:
    """How a call ended: the value it returned, or the reason why there is none."""

    status: Literal["returned", "raised", "hung", "crashed"]
    value: Any = None
    reason: str = ""  # in one line
    details: str = ""  # a traceback, or the end of what the process wrote to stderr
    seconds: float = 0.0


class Worker:
    """One process, started when it is first needed; a context manager, which ends it."""

    def __init__(self, env: Mapping[str, str] | None = None):
        """`env`: environment variables beside those of this process."""
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: str, args: tuple[Any, ...], timeout_s: float) -> Outcome:
        """Call `"package.module:name"` with `args`; arguments and result are pickled.

        `timeout_s` is for the call alone: the process has imported JAX before.
        """
        if self._process is None:
            self._start()
        start = time.monotonic()
        try:
            self._connection.send((function, args))
            if not self._connection.poll(timeout_s):
                self.close()
                return Outcome("hung", reason=f"no result in {timeout_s:g} s", seconds=timeout_s)
            status, value, reason, details = self._connection.recv()
        except (EOFError, OSError):
            return self._crash(time.monotonic() - start)
        return Outcome(status, value, reason, details, time.monotonic() - start)

    def _start(self) -> None:
        self._connection, far_end = Pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(far_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[far_end.fileno()],
            # Unbuffered: a process that a signal ends has told its last words.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTHONUNBUFFERED": "1",
                **self._env,
            },
            start_new_session=True,  # so that it ends with all that it starts
        )
        far_end.close()
        try:
            ready = self._connection.poll(START_TIMEOUT_S) and self._connection.recv()
        except EOFError:
            ready = False
        if not ready:
            outcome = self._crash(START_TIMEOUT_S)
            raise RuntimeError(f"a worker did not start: {outcome.reason}\n{outcome.details}")

    def _crash(self, seconds: float) -> Outcome:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.poll()
        self._errors.seek(0)
        details = self._errors.read().decode(errors="replace")
        self.close()
        reason = "the process did not answer"
        if code is not None:
            end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            reason = f"the process ended with {end}"
        last_lines = "\n".join(details.strip().splitlines()[-CRASH_LINES:])
        return Outcome("crashed", reason=reason, details=last_lines, seconds=seconds)

    def kill(self) -> None:
        """Stop the process, whatever it is doing, with all processes that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop the process and free its resources; the next call starts another."""
        if self._process is None:
            return
        self.kill()
        self._process.wait()
        self._connection.close()
        self._errors.close()
        self._process = None


def run_isolated(function: str, args: tuple[Any, ...], timeout_s: float) -> Outcome:
    """One call in a process of its own."""
    with Worker() as worker:
        return worker.call(function, args, timeout_s)


def run_all(
    calls: Iterable[tuple[str, tuple[Any, ...]]],
    timeout_s: float,
    *,
    num_workers: int,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, Outcome]]:
    """Make calls, each (function, args), in parallel; yields (index, outcome) as they end."""
    todo: queue.SimpleQueue[tuple[int, tuple[str, tuple[Any, ...]]]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Outcome | BaseException]] = queue.SimpleQueue()
    for item in enumerate(calls):
        todo.put(item)
    count = todo.qsize()
    workers = [Worker(env) for _ in range(min(num_workers, count))]

    def work(worker: Worker) -> None:
        with worker, contextlib.suppress(queue.Empty):
            while True:
                index, (function, args) = todo.get_nowait()
                try:
                    done.put((index, worker.call(function, args, timeout_s)))
                except BaseException as error:  # raised where the results are taken
                    done.put((index, error))

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for _ in range(count):
            index, outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            yield index, outcome
    finally:  # perhaps early: no further call begins, and running calls are stopped
        with contextlib.suppress(queue.Empty):
            while True:
                todo.get_nowait()
        for worker in workers:
            worker.kill()
        for thread in threads:
            thread.join()


def _serve(connection: Connection) -> None:
    """Answer calls, in the worker's process, until the other side is gone."""
    parent = os.getppid()

    def watch_parent() -> None:  # a call that hangs ends with the process that asked for it
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch_parent, daemon=True).start()
    importlib.import_module("jax")
    connection.send("ready")
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            module, name = function.split(":")
            answer = ("returned", getattr(importlib.import_module(module), name)(*args), "", "")
        except Exception as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            answer = ("raised", None, line, traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
