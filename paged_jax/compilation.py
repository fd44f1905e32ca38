"""JAX's compilations: done ahead, kept on disk between runs, and counted."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.stages import Lowered
from tqdm import tqdm


def use_persistent_cache() -> None:
    """Keep compiled programs in a folder of the user's cache, unless JAX has been given one.

    ``JAX_COMPILATION_CACHE_DIR`` names another folder; ``JAX_ENABLE_COMPILATION_CACHE=0`` turns it
    off.
    """
    if jax.config.jax_compilation_cache_dir is None:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache_home / "paged_jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_all(lowerings: Mapping[str, Callable[[], Lowered]], *, progress: bool) -> None:
    """Compile jitted functions for given arguments, so that calling them compiles nothing.

    Nothing runs. Threads overlap the tracing of one with the compilation of another.
    """
    with (
        ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as pool,
        tqdm(total=len(lowerings), desc="compiling", unit="step", disable=not progress) as bar,
    ):
        jobs = [pool.submit(_compile, lower) for lower in lowerings.values()]
        for job in as_completed(jobs):
            job.result()
            bar.update()


def _compile(lower: Callable[[], Lowered]) -> None:
    lower().compile()


@dataclass
class CompilationCount:
    """Programs compiled, or loaded from the persistent cache."""

    programs: int = 0


_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Counts while the block runs; also those of other threads."""
    count = CompilationCount()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            count.programs += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
