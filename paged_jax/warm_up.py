"""Compiling steps ahead, in the background, in the order in which they are wanted."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager

from jax.stages import Lowered
from tqdm import tqdm

_thread = threading.local()


def is_warming_up() -> bool:
    """Whether this thread is compiling ahead right now."""
    return getattr(_thread, "warming_up", False)


@contextmanager
def _warming_up() -> Iterator[None]:
    _thread.warming_up = True
    try:
        yield
    finally:
        _thread.warming_up = False


class WarmUp:
    """Compiles jitted functions for given arguments, so that calling them compiles nothing.

    Nothing runs. Threads start at once and overlap the tracing of one with the compilation of
    another; whoever needs a function now calls `require` and has it next.
    """

    def __init__(self, lowerings: Mapping[str, Callable[[], Lowered]]):
        self.waited_s = 0.0  # seconds that `require` has kept its callers waiting
        self._lowerings = lowerings
        self._pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2))
        self._jobs: dict[str, Future[None]] = {
            name: self._pool.submit(_compile, lower) for name, lower in lowerings.items()
        }
        self._pool.shutdown(wait=False)

    def require(self, name: str) -> None:
        """Return once this function is compiled; compiles it here if no thread has begun."""
        job = self._jobs.get(name)
        if job is None:
            return
        start = time.perf_counter()
        if job.cancel():
            _compile(self._lowerings[name])
            del self._jobs[name]
        else:
            job.result()
        self.waited_s += time.perf_counter() - start

    def wait(self, *, progress: bool) -> None:
        """Return once all are compiled; raises what their compilation raised."""
        jobs = self._jobs
        with tqdm(total=len(jobs), desc="compiling", unit="step", disable=not progress) as bar:
            for job in as_completed(jobs.values()):
                job.result()
                bar.update()
        jobs.clear()

    def cancel(self) -> None:
        """Give up what has not begun."""
        for job in self._jobs.values():
            job.cancel()


def _compile(lower: Callable[[], Lowered]) -> None:
    with _warming_up():
        lower().compile()
