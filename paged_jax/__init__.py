"""A JAX/Pallas research framework for paged attention.

Public names load on first use, so that host code (``paged_jax.memory``,
``paged_jax.scheduling``, ``paged_jax.workloads``) can be imported without JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paged_jax.xla_flags import prefer_vector_loops

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine
    from paged_jax.outputs import CompletionOutput, RequestOutput
    from paged_jax.sampling_params import SamplingParams

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
