"""The arguments of every op at its entry: whatever `jnp.asarray` takes, as the arrays kernels want.

An implementation then sees jax arrays alone, and indices that are strongly typed int32.
"""

import operator
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

_KINDS: dict[type, tuple[Callable[[Any], Any], str]] = {
    float: (float, "a number"),
    int: (operator.index, "an integer"),
    bool: (bool, "True or False"),
}
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
        with jax.enable_x64(True):  # 64 bits stay so until they are clipped
            x = x.clip(max(limits.min, _INT32.min), min(limits.max, _INT32.max)).astype(np.int32)
    return x.astype(np.int32) if isinstance(x, np.ndarray) else jnp.asarray(x, jnp.int32)


def check_range(
    name: str, x: Any, stop: int, why: str, *, least: int = 0, where: Any = True
) -> None:
    """ValueError for an index that the host knows not to be from `least` to below `stop`.

    What is traced, or on a device, is not looked at: that would cost a wait.
    """
    if isinstance(x, np.ndarray):
        outside = np.argwhere(where & ((x < least) | (x >= stop)))
        if len(outside):
            at = tuple(outside[0].tolist())
            value = f"{x[at]}{' or more' if x[at] == _INT32.max else ''}"
            side = f"below {least}" if x[at] < least else f"above {stop - 1}"
            raise ValueError(f"{name}{list(at)} is {value}, {side}: {why}")


def as_static(
    options: object, name: str, kind: type, instead: str = "name it in static_argnames of jax.jit"
) -> None:
    """Make a field of frozen options None or Python's own float, int or bool.

    Such a value has a hash, and no dtype that would promote others. ValueError for values of other
    kinds, and for a traced one, as it must be known then; `instead` says what to do.
    """
    value = getattr(options, name)
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be static, got a traced value; {instead}")
    convert, kind_name = _KINDS[kind]
    try:
        if isinstance(value, str) or (kind is not bool and isinstance(value, bool)):
            raise TypeError
        object.__setattr__(options, name, None if value is None else convert(value))
    except (TypeError, ValueError, OverflowError) as error:
        shown = " ".join(reprlib.repr(value).split())
        raise ValueError(f"{name} must be {kind_name}, got {shown}") from error


def _check_rank(name: str, x: Any, axes: str) -> None:
    rank = axes.count(",") + 1
    if x.ndim != rank:
        raise ValueError(f"{name} must have {rank} axes {axes}, got shape {x.shape}")


def _refuse(name: str, error: Exception) -> NoReturn:
    [reason, *_] = str(error).splitlines() or [type(error).__name__]
    raise ValueError(f"{name} is no array of numbers: {reason}") from error
