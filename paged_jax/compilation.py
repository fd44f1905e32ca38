"""JAX's compilations: kept on disk between runs, and counted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

from paged_jax.warm_up import is_warming_up


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


@dataclass
class CompilationCount:
    """Programs compiled, or loaded from the persistent cache, other than by a warm-up."""

    programs: int = 0


_EVENT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Counts while the block runs; also those of other threads."""
    count = CompilationCount()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT and not is_warming_up():
            count.programs += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
