"""Compiling steps ahead, in the background, in the order in which they are wanted."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
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

    Nothing runs. Threads start at once, in the order given; whoever needs a function now calls
    `require` and has it next.
    """

    def __init__(self, lowerings: Mapping[str, Callable[[], Lowered]]):
        self.waited_s = 0.0  # seconds that `require` has kept its callers waiting
        self._lowerings = lowerings
        self._jobs: dict[str, Future[None]] = {name: Future() for name in lowerings}
        queue = iter(list(self._jobs.items()))  # taking the next one is atomic
        # Half of the cores: the others load the model and serve.
        for _ in range(max(1, (os.cpu_count() or 1) // 2)):
            threading.Thread(target=_work, args=(queue, lowerings), name="warm-up").start()

    def require(self, name: str) -> None:
        """Return once this function is compiled; compiles it here if no thread has begun."""
        if name in self._jobs:
            start = time.perf_counter()
            self._complete(name)
            self.waited_s += time.perf_counter() - start

    def wait(self, *, progress: bool) -> None:
        """Return once all are compiled, helping from the end; raises what a compilation raised."""
        names = list(reversed(self._jobs))
        for name in tqdm(names, desc="compiling", unit="step", disable=not progress):
            self._complete(name)

    def _complete(self, name: str) -> None:
        job = self._jobs.pop(name)
        if job.cancel():
            _compile(self._lowerings[name])
        else:
            job.result()

    def cancel(self) -> None:
        """Give up what has not begun."""
        for job in self._jobs.values():
            job.cancel()


def _work(
    queue: Iterator[tuple[str, Future[None]]], lowerings: Mapping[str, Callable[[], Lowered]]
) -> None:
    for name, job in queue:
        if not threading.main_thread().is_alive():
            return  # the interpreter is on its way out and waits for this thread
        if job.set_running_or_notify_cancel():
            try:
                _compile(lowerings[name])
            except BaseException as error:
                job.set_exception(error)
            else:
                job.set_result(None)


def _compile(lower: Callable[[], Lowered]) -> None:
    with _warming_up():
        lower().compile()
