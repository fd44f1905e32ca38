"""JAX's default rules for types and shapes, whatever the process has set."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def default_numerics() -> Iterator[None]:
    """A `with` block, or a function that this decorates, sees JAX's default rules.

    `jax_enable_x64`, `jax_numpy_dtype_promotion` and `jax_numpy_rank_promotion` are for the code of
    those who set them. What is written for 32 bits, and for arrays that broadcast, keeps to that.
    """
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
