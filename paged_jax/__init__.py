"""A JAX/Pallas research framework for paged attention.

Public names load on first use, so that host code (`paged_jax.memory`, `paged_jax.scheduling`,
`paged_jax.workloads`) can be imported without JAX.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_jax.config import EngineConfig
    from paged_jax.engine.engine import Engine
    from paged_jax.outputs import CompletionOutput, RequestOutput
    from paged_jax.sampling_params import SamplingParams
    from paged_jax.structured_outputs import StructuredOutputsParams

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOME = {
    "CompletionOutput": "paged_jax.outputs",
    "Engine": "paged_jax.engine.engine",
    "EngineConfig": "paged_jax.config",
    "RequestOutput": "paged_jax.outputs",
    "SamplingParams": "paged_jax.sampling_params",
    "StructuredOutputsParams": "paged_jax.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'paged_jax' has no attribute {name!r}")


def prefer_vector_loops() -> None:
    """Keep XLA's CPU compiler from unrolling loops that it could vectorise.

    An unrolled gather of a KV block copies one float at a time, at a third of the speed. The user's
    own extra options in `XLA_FLAGS` are left alone. The setting has no effect on a GPU, and none
    once JAX has started its backend: this runs at import.
    """
    option, flags = "--xla_backend_extra_options", os.environ.get("XLA_FLAGS", "")
    if option not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {option}=xla_cpu_disable_loop_unrolling".strip()


prefer_vector_loops()
