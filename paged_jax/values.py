"""Checks of the values that callers give, and their plain forms: Python's own numbers and lists.

A check takes the value's name, for the message. It returns the value in its plain form, or raises
ValueError in one line. Scalars and arrays of numpy and JAX are as good as Python's.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any

Check = Callable[..., Any]


def plain(value: Any) -> Any:
    """A scalar or an array of numpy or JAX as Python has it; anything else as it is."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview):
        return value.tolist()
    return value


def items(value: Any) -> list[Any] | None:
    """What an iterable holds, in plain forms; an iterator is used up.

    None for what is one thing: text, bytes, anything with keys, a number.
    """
    value = plain(value)
    if isinstance(value, str | bytes | bytearray | memoryview) or hasattr(value, "keys"):
        return None
    return [plain(item) for item in value] if isinstance(value, Iterable) else None


def is_number(value: Any, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def one_line(error: object) -> str:
    """What an exception says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def flag(name: str, value: Any) -> bool:
    if not isinstance(value := plain(value), bool):
        raise ValueError(f"{name} must be True or False, got {value!r:.80}")
    return value


def integer(name: str, value: Any, *, low: float = -math.inf, high: float = math.inf) -> int:
    if not is_number(value := plain(value), Integral):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}")
    result = int(value)
    if not low <= result <= high:
        bound = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bound}, got {value!r}")
    return result


def number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above_low: bool = False,
) -> float:
    """A finite number, from `low` (or above it) to `high`."""
    if not is_number(value := plain(value)):
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


def check_unicode(name: str, text: str) -> None:
    """ValueError for half a character, a lone surrogate, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"{error.reason} (at {error.start})"
        raise ValueError(f"{name} is not valid Unicode: {reason}") from None


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or several; none of them empty."""
    value = plain(value)
    found = [value] if isinstance(value, str) else _in_order(value)
    if found is None:
        raise ValueError(f"{name} must be a string or a sequence of strings, got {value!r:.80}")
    for item in found:
        if not isinstance(item, str):
            raise ValueError(f"{name} must hold strings, got {item!r:.80}")
        if not item:
            raise ValueError(f"{name} must not hold an empty string, got {value!r:.80}")
    return tuple(found)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if (found := _in_order(value)) is None:
        raise ValueError(f"{name} must be a sequence of token ids, got {plain(value)!r:.80}")
    for token in found:
        if not is_number(token, Integral) or token < 0:
            raise ValueError(f"{name} must hold token ids of at least 0, got {token!r:.80}")
    return tuple(map(int, found))


def _in_order(value: Any) -> list[Any] | None:
    """`items`, those of a set in an order that does not depend on the process."""
    found = items(value)
    return sorted(found, key=repr) if found and isinstance(value, set | frozenset) else found


def made_from[T](name: str, value: Any, *, kind: type[T]) -> T:
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


def unknown(kind: str, name: Any, names: Collection[str]) -> str:
    """The message for a name that is none of `names`, with the nearest of them."""
    nearest = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"one of {', '.join(names)}"
    return f"unknown {kind} {name!r:.80}; {hint}"


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
