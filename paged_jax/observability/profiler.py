"""JAX's own profile of what the device did, iteration by iteration."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax


@contextmanager
def profile(log_dir: str | Path) -> Iterator[None]:
    """Profile what runs inside; `log_dir` gets a trace for XProf, TensorBoard and Perfetto.

    Perfetto opens the folder's `perfetto_trace.json.gz`. Python's calls are left out: they would
    take ten times the space and slow the host. ValueError if the folder cannot be made.
    """
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {log_dir}: {error.strerror}") from None
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(log_dir), create_perfetto_trace=True, profiler_options=options):
        yield


def iteration_mark(index: int) -> AbstractContextManager[object]:
    """Marks what runs inside as an iteration in the profile; costs little where none is taken."""
    return jax.profiler.StepTraceAnnotation("iteration", step_num=index)
