"""A JAX/Pallas research framework for paged attention.

Public names load on first use, so that host code (``paged_jax.memory``,
``paged_jax.scheduling``, ``paged_jax.workloads``) can be imported without JAX.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine
    from paged_jax.outputs import CompletionOutput, RequestOutput
    from paged_jax.sampling_params import SamplingParams

_OPTION = "--xla_backend_extra_options"


def prefer_vector_loops() -> None:
    """Keep XLA's CPU compiler from unrolling loops that it could vectorise.

    Unrolled, the gather of a KV block copies one float at a time, at a third of the speed. A user's
    own extra options are left alone. Has no effect once JAX has started its backend, and none on a
    GPU.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _OPTION not in flags:
        option = f"{_OPTION}=xla_cpu_disable_loop_unrolling"
        os.environ["XLA_FLAGS"] = f"{flags} {option}".strip()


prefer_vector_loops()

_HOME = {
    "Engine": "paged_jax.engine.engine",
    "CompletionOutput": "paged_jax.outputs",
    "RequestOutput": "paged_jax.outputs",
    "SamplingParams": "paged_jax.sampling_params",
}

__all__ = ["CompletionOutput", "Engine", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'paged_jax' has no attribute {name!r}")
