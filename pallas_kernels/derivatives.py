"""The refusal of an implementation that has no derivatives, which names those that have."""

from functools import partial
from typing import Any

import jax
from jax import Array

from pallas_kernels.registry import Unsupported


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_derivatives(kernel: str, *arrays: Array) -> tuple[Array, ...]:
    """A kernel's inputs, as they are; `Unsupported` where JAX differentiates the kernel.

    JAX itself would stop at a bare assertion, or at the name of one of its primitives.
    """
    return arrays


@without_derivatives.defjvp
def _refuse(kernel: str, primals: Any, tangents: Any) -> Any:
    raise Unsupported(f"{kernel} has no derivatives; differentiate impl='reference' or 'xla'")
