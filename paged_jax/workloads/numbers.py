"""Numbers and times as the writers of traces print them."""

import math
from datetime import UTC, datetime, timedelta

# No model takes as many; a longer length is a slip in the file, and its prompt fills the memory.
MAX_TOKENS = 10_000_000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# In seconds it is the year 5138, in milliseconds 1973: a later time counts a smaller unit.
_LATEST_S = 1e11


def token_count(value: object, name: str) -> int:
    """`value` as a number of tokens; ValueError says what is wrong."""
    count = whole_number(value, name, 1)
    if count > MAX_TOKENS:
        raise ValueError(f"{name} must be at most {MAX_TOKENS}, got {count}")
    return count


def whole_number(value: object, name: str, minimum: int) -> int:
    """`value`, a whole number or the text of one (512, 512.0), as an int of at least `minimum`."""
    number = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = _float(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r:.80}")
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def microseconds(value: object, name: str, *, per_second: int = 1) -> int:
    """A time in microseconds: a number of seconds, or an ISO date, then since 1970.

    per_second: how many of the number's units make a second. An epoch time may count milli-, micro-
    or nanoseconds instead. A date without a time zone is in UTC.
    """
    if isinstance(value, str) and math.isnan(_float(value)):
        try:
            date = datetime.fromisoformat(value.strip().removesuffix(" UTC"))
        except ValueError:
            raise ValueError(f"{name} must be a date or a number, got {value!r:.80}") from None
        since = (date if date.tzinfo else date.replace(tzinfo=UTC)) - _EPOCH
        return since // timedelta(microseconds=1)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"{name} must be a date or a number, got {value!r:.80}")
    seconds = float(value) / per_second
    unit = next((unit for unit in (1, 1e3, 1e6, 1e9) if seconds / unit < _LATEST_S), None)
    if unit is None or not seconds >= 0:
        raise ValueError(f"{name} must be a date or a number of at least 0, got {value!r:.80}")
    return round(seconds / unit * 1e6)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
