"""Reading trace files line by line, so that every complaint can name its line."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path


def read_columns(path: str | Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Each row's line number and its fields of the named columns; blank lines are passed over.

    Columns may come in any order and with others. ValueError names the line that is no row.
    """
    lines = read_lines(path)
    _, header = next(lines, (1, ""))
    names = [name.strip() for name in header.split(",")]
    if missing := [name for name in columns if name not in names]:
        raise line_error(path, 1, f"no column {', '.join(missing)} in the header {header!r}")
    places = [names.index(name) for name in columns]
    for number, line in lines:
        if not line.strip():
            continue
        try:
            fields = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise line_error(path, number, str(error)) from None
        if len(fields) != len(names):
            message = f"{len(names)} fields expected, got {len(fields)} in {line!r}"
            raise line_error(path, number, message)
        yield number, [fields[place] for place in places]


# No model takes as many; a longer length is a slip in the file, and its prompt fills the memory.
MAX_TOKENS = 10_000_000


def require_file(path: str | Path) -> Path:
    """The path, or ValueError where it names no file."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: not a file")
    return path


def line_error(path: str | Path, line: int, what: str) -> ValueError:
    return ValueError(f"{path}, line {line}: {what}")


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Each line of a UTF-8 file without its line end, with its number, counted from 1."""
    path = require_file(path)
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                # A byte order mark is legal on the first line and no part of its text.
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise line_error(path, number, f"not UTF-8 ({error.reason})") from None
            yield number, text.rstrip("\r\n")


def token_count(value: object, name: str) -> int:
    """`value`, an int or its digits, as a number of tokens; ValueError says what is wrong."""
    count = whole_number(value, name, 1)
    if count > MAX_TOKENS:
        raise ValueError(f"{name} must be at most {MAX_TOKENS}, got {count}")
    return count


def whole_number(value: object, name: str, minimum: int) -> int:
    """`value`, an int or its digits, as an int of at least `minimum`."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return value
