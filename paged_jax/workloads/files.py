"""Reading trace files: lines, columns of CSV, elements of a JSON list. Errors name the line."""

import codecs
import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

# No model takes as many; a longer length is a slip in the file, and its prompt fills the memory.
MAX_TOKENS = 10_000_000

CHUNK_BYTES = 1 << 22
_SPACE = re.compile(r"[ \t\r\n]*")
# The longest word of JSON that can be half there (-Infinity), or half an escaped character.
_LONGEST_HALF = 9


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


class JsonListReader:
    """Iterates once over the elements of a JSON list in a file too large to be held twice.

    A file that ends before its list does gives every whole element and sets `cut_off`. Anything
    else that is not JSON raises ValueError with the line.
    """

    def __init__(self, path: str | Path, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = require_file(path)
        self.cut_off = False
        self._chunk_bytes = chunk_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._position = 0
        self._start = 0  # of the element last read
        self._line = 1  # at the start of _text

    def error(self, what: str) -> ValueError:
        """A complaint about the element last read, which names its line."""
        return self._error_at(self._start, what)

    def _error_at(self, position: int, what: str) -> ValueError:
        return line_error(self.path, self._line + self._text.count("\n", 0, position), what)

    def __iter__(self) -> Iterator[object]:
        with self.path.open("rb") as file:
            if (opening := self._next_character(file)) != "[":
                found = f"{opening!r}" if opening else "an empty file"
                raise self._error_at(self._position, f"a JSON list expected, got {found}")
            self._position += 1
            if self._next_character(file) == "]":
                return
            decoder = json.JSONDecoder()
            while True:
                self._next_character(file)
                try:
                    value, end = decoder.raw_decode(self._text, self._position)
                except json.JSONDecodeError as error:
                    if not self._may_be_half(error):
                        raise self._error_at(error.pos, f"not JSON: {error.msg}") from None
                    if self._read_more(file):
                        continue
                    self.cut_off = True
                    return
                if end == len(self._text) and self._read_more(file):
                    continue  # a number that may go on
                self._start, self._position = self._position, end
                yield value
                separator = self._next_character(file)
                if separator == "":
                    self.cut_off = True
                    return
                if separator == "]":
                    return
                if separator != ",":
                    raise self._error_at(self._position, f"',' or ']' expected, got {separator!r}")
                self._position += 1

    def _may_be_half(self, error: json.JSONDecodeError) -> bool:
        if error.msg.startswith("Unterminated string"):
            return True
        return error.pos >= len(self._text) - _LONGEST_HALF

    def _next_character(self, file: BinaryIO) -> str:
        """Move to the next character that is no white space; "" at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._position)
            assert space is not None
            self._position = space.end()
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more(file):
                return ""

    def _read_more(self, file: BinaryIO) -> bool:
        """Drop the text already used and append what follows; False at the end of the file."""
        rest = self._text[self._position :]
        # At least doubling what is left keeps a huge element from being decoded again and again.
        raw = file.read(max(self._chunk_bytes, len(rest)))
        if not raw:
            return False
        try:
            more = self._decode.decode(raw)
        except UnicodeDecodeError as error:
            line = self._line + self._text.count("\n") + raw.count(b"\n", 0, error.start)
            raise line_error(self.path, line, f"not UTF-8 ({error.reason})") from None
        self._line += self._text.count("\n", 0, self._position)
        self._text, self._position, self._start = rest + more, 0, 0
        return True
