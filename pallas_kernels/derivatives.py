"""Where an implementation has no derivatives: a refusal that says which one has."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.registry import Unsupported


def without_derivatives[F: Callable[..., Any]](name: str) -> Callable[[F], F]:
    """Decorate a function of arrays, and of options by keyword, that JAX cannot differentiate.

    Where JAX would, `Unsupported` is raised; its own message is a bare assertion, or the name of
    one of its primitives.
    """

    @jax.custom_jvp
    def guarded(*arrays: Any) -> Any:
        return arrays

    @guarded.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise Unsupported(f"{name} has no derivatives; differentiate impl='reference' or 'xla'")

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapped(*arrays: Any, **options: Any) -> Any:
            # The arguments are guarded, not the call: within it a kernel could not write in place.
            return function(*guarded(*arrays), **options)

        return wrapped  # type: ignore[return-value]

    return decorate
