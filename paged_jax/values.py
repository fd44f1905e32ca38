"""Values that callers give: plain Python ones of the right kind, or ValueError in one line.

A number, a flag or an array of numpy or JAX is as good as a number, a flag or a list of Python's.
The functions take the name of the value, for the message, and return it in its plain form.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any

Check = Callable[..., Any]


def plain(value: Any) -> Any:
    """Scalars and arrays of numpy and JAX as Python has them."""
    return value.tolist() if hasattr(value, "tolist") else value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value := plain(value), bool):
        raise ValueError(f"{name} must be True or False, got {value!r:.80}")
    return value


def integer(name: str, value: Any, *, low: int, high: float = math.inf) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}")
    result = int(value)
    if not low <= result <= high:
        bound = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bound}, got {value!r}")
    return result


def number(
    name: str, value: Any, *, low: float, high: float = math.inf, above_low: bool = False
) -> float:
    """A finite number, from `low` (or above it) to `high`."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r:.80}")
    try:
        result = float(value)
    except OverflowError:  # an integer beyond all floats
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{name} must be finite, got {value!r:.80}")
    if not low <= result <= high or (above_low and result == low):
        bound = f"above {low}" if above_low else f"at least {low}"
        if high != math.inf:
            bound += f" and at most {high}"
        raise ValueError(f"{name} must be {bound}, got {value!r}")
    return result


def string(name: str, value: Any) -> str:
    if not isinstance(value := plain(value), str):
        raise ValueError(f"{name} must be a string, got {value!r:.80}")
    return value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or several; none of them empty."""
    value = plain(value)
    items = (value,) if isinstance(value, str) else _items(value)
    if items is None:
        raise ValueError(f"{name} must be a string or a sequence of strings, got {value!r:.80}")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{name} must hold strings, got {item!r:.80}")
        if not item:
            raise ValueError(f"{name} must not hold an empty string, got {value!r:.80}")
    return items


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    value = plain(value)
    items = _items(value)
    if items is None:
        raise ValueError(f"{name} must be a sequence of token ids, got {value!r:.80}")
    for token in items:
        if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
            raise ValueError(f"{name} must hold token ids of at least 0, got {token!r:.80}")
    return tuple(int(token) for token in items)


def _items(value: Any) -> tuple[Any, ...] | None:
    """What a collection or a generator holds, a set in order; None for anything else."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return None
    items = map(plain, value)
    return tuple(sorted(items, key=repr) if isinstance(value, set | frozenset) else items)


# Fields of a dataclass that are checked when it is made


def checked(check: Check, default: Any, *, optional: bool = False, **bounds: Any) -> Any:
    """A field whose value `check(name, value, **bounds)` puts into its plain form.

    optional: it may be None; so may one whose default is None. For a collection that is empty by
        default, None is another way to say empty.
    """
    optional = optional or default is None
    return field(default=default, metadata={"check": check, "optional": optional, "bounds": bounds})


def check_fields(instance: Any) -> None:
    """Put the fields of a frozen dataclass, all of them `checked`, into their plain forms."""
    for each in fields(instance):
        value, how = getattr(instance, each.name), each.metadata
        if value is each.default or (value is None and how["optional"]):
            continue
        if value is None and each.default == ():
            value = ()
        object.__setattr__(instance, each.name, how["check"](each.name, value, **how["bounds"]))


def unknown(kind: str, name: Any, names: Collection[str]) -> str:
    """What is wrong with a name that is none of `names`: it may be a misspelt one."""
    nearest = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"one of {', '.join(names)}"
    return f"unknown {kind} {name!r:.80}; {hint}"


def made_from[T](kind: type[T], value: Any, name: str) -> T:
    """A dataclass, given as it is or as a dict of its fields."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        form = f"{kind.__name__} or a dict of its fields"
        raise ValueError(f"{name} must be {form}, got {value!r:.80}")
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    for key in value:
        if key not in names:
            raise ValueError(unknown(f"key of {name}", key, names))
    return kind(**value)
