"""Where an implementation has no derivatives: a refusal that says which one has."""

from functools import partial
from typing import Any

import jax
from jax import Array

from pallas_kernels.registry import Unsupported


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_derivatives(kernel: str, *arrays: Array) -> tuple[Array, ...]:
    """The arrays, inputs of a kernel; `Unsupported` where JAX differentiates what becomes of them.

    JAX itself stops at a bare assertion, or at the name of one of its primitives.
    """
    return arrays


@without_derivatives.defjvp
def _refuse(kernel: str, primals: Any, tangents: Any) -> Any:
    raise Unsupported(f"{kernel} has no derivatives; differentiate impl='reference' or 'xla'")
