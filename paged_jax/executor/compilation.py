"""JAX's compilations: ahead of their use, kept on disk between runs, and counted."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.stages import Lowered
from tqdm import tqdm

from paged_jax.executor.settings import current_settings

_thread = threading.local()  # is_warming_up: whether it compiles ahead right now


class WarmUp:
    """Compiles jitted functions for given arguments, so that calling them compiles nothing.

    Nothing runs. Threads start at once, in the order given; `require` compiles a function next.
    """

    def __init__(self, lowerings: Mapping[str, Callable[[], Lowered]]):
        self.waited_s = 0.0  # seconds that `require` has kept its callers waiting
        self._lowerings = lowerings
        self._jobs: dict[str, Future[None]] = {name: Future() for name in lowerings}
        queue = iter(list(self._jobs.items()))  # taking the next one is atomic
        settings = current_settings()  # threads know nothing of the `with` blocks around this call
        # Half of the cores compile: the other half loads the model and serves.
        for _ in range(max(1, (os.cpu_count() or 1) // 2)):
            threading.Thread(
                target=_work, args=(queue, lowerings, settings), name="warm-up"
            ).start()

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
        """Compile no function that no thread has begun."""
        for job in list(self._jobs.values()):  # another thread may be in `wait`
            job.cancel()


def _work(
    queue: Iterator[tuple[str, Future[None]]],
    lowerings: Mapping[str, Callable[[], Lowered]],
    settings: Callable[[], AbstractContextManager[None]],
) -> None:
    for name, job in queue:
        if not threading.main_thread().is_alive():
            return  # the interpreter is on its way out and waits for this thread
        if job.set_running_or_notify_cancel():
            try:
                with settings():
                    _compile(lowerings[name])
            except BaseException as error:
                job.set_exception(error)
            else:
                job.set_result(None)


def _compile(lower: Callable[[], Lowered]) -> None:
    _thread.is_warming_up = True
    try:
        lower().compile()
    finally:
        _thread.is_warming_up = False


def use_persistent_cache() -> None:
    """Keep compiled programs in a folder of the user's cache, unless JAX has been given one.

    `JAX_COMPILATION_CACHE_DIR` names another folder; `JAX_ENABLE_COMPILATION_CACHE=0` turns it off.
    """
    if jax.config.jax_compilation_cache_dir is None:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache_home / "paged_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclass
class CompilationCount:
    """Programs that were compiled or loaded from the persistent cache, but not by a warm-up."""

    programs: int = 0


_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Counts while the block runs, in all threads."""
    count = CompilationCount()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT and not getattr(_thread, "is_warming_up", False):
            count.programs += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
