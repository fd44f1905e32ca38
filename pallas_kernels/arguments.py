"""The arguments of every op at its entry: whatever `jnp.asarray` takes, as the arrays kernels want.

An implementation then sees jax arrays alone, and indices that are strongly typed int32.
"""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

_INT32 = jnp.iinfo(jnp.int32)


def as_array(name: str, x: ArrayLike, axes: str) -> Array:
    """A jax array, strongly typed, of axes such as "[B, T]"; ValueError for what is none."""
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        _refuse(name, error)
    _check_rank(name, x, axes)
    return jnp.asarray(x, x.dtype)  # names the dtype, which makes it strong


def as_indices(name: str, x: ArrayLike, axes: str) -> Array | np.ndarray:
    """Integers of any type as int32, still in numpy where the host has them.

    What is beyond int32 becomes its largest or smallest, which names no block: it does not wrap
    around to one that exists. ValueError for other dtypes and axes.
    """
    if not isinstance(x, jax.Array):
        try:
            on_host = not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))
            is_typed = hasattr(x, "dtype")
            x = np.asarray(x) if on_host else jnp.asarray(x)
        except (TypeError, ValueError, OverflowError) as error:
            _refuse(name, error)
        if not is_typed and x.size == 0:
            x = x.astype(np.int32)  # an empty list has no type of its own
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {x.dtype}{list(x.shape)}")
    _check_rank(name, x, axes)
    limits = jnp.iinfo(x.dtype)
    if limits.min < _INT32.min or limits.max > _INT32.max:
        x = x.clip(max(limits.min, _INT32.min), min(limits.max, _INT32.max))
    return x.astype(np.int32) if isinstance(x, np.ndarray) else jnp.asarray(x, jnp.int32)


def check_range(name: str, x: Any, valid: range, why: str, *, where: Any = True) -> None:
    """ValueError for an index that the host knows not to be in a range; `why` is its reason.

    What is traced, or on a device, is not looked at: that would cost a wait.
    """
    if isinstance(x, np.ndarray):
        outside = np.argwhere(where & ((x < valid.start) | (x >= valid.stop)))
        if len(outside):
            at = tuple(outside[0].tolist())
            value = f"{x[at]}{' or more' if x[at] == _INT32.max else ''}"
            raise ValueError(
                f"{name}{list(at)} is {value}, not in {valid.start} to {valid.stop - 1}: {why}"
            )


def check_static(options: object, **instead: str) -> None:
    """ValueError for a traced field of options; `instead` says for a field what else to do."""
    for name, value in vars(options).items():
        if isinstance(value, jax.core.Tracer):
            advice = instead.get(name, "name it in static_argnames of jax.jit, or close over it")
            raise ValueError(f"{name} must be known when the call is traced; {advice}")


def _check_rank(name: str, x: Any, axes: str) -> None:
    rank = axes.count(",") + 1
    if x.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes {axes}, got shape {x.shape}")


def _refuse(name: str, error: Exception) -> NoReturn:
    [reason, *_] = str(error).splitlines() or [type(error).__name__]
    raise ValueError(f"{name} is no array of numbers: {reason}") from error
