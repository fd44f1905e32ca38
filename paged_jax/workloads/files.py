"""Trace files: lines, columns of CSV, JSON lines, elements of a JSON list, each with its place."""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from paged_jax.workloads.records import Placed, Skipped

CHUNK_BYTES = 1 << 22
_SPACE = re.compile(r"[ \t\r\n]*")
_MAYBE_NEXT = re.compile(r"[}\],\n]\s*(?=\{)")
# The longest word of JSON that can be half there (-Infinity), or half an escaped character.
_LONGEST_HALF = 9

# What else a file may be, by its first bytes.
_NOT_TEXT = {
    b"\x1f\x8b": "is compressed with gzip; unpack it first",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"BZh": "is compressed with bzip2; unpack it first",
    b"\xfd7zXZ": "is compressed with xz; unpack it first",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it first",
    b"PAR1": "is a Parquet file; write it as text first",
    b"\xff\xfe": "is not UTF-8 but UTF-16; save it as UTF-8",
    b"\xfe\xff": "is not UTF-8 but UTF-16; save it as UTF-8",
}
# Raw line ends and tabs inside of strings are taken too.
_JSON = json.JSONDecoder(strict=False)


def require_text(path: str | Path) -> Path:
    """The path, or ValueError where it names no file, or one that holds no text."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: not a file")
    with path.open("rb") as file:
        head = file.read(8)
    for magic, what in _NOT_TEXT.items():
        if head.startswith(magic):
            raise ValueError(f"{path} {what}")
    return path


def read_lines(
    path: str | Path, skipped: Skipped, *, errors: str = "strict"
) -> Iterator[Placed[str]]:
    """Each line of a file without its line end; one that is not UTF-8 is skipped.

    errors: what `bytes.decode` does instead.
    """

    def raw_lines() -> Iterator[Placed[bytes]]:
        with require_text(path).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                # A byte order mark is legal on the first line and no part of its text.
                yield f"line {number}", raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw

    def decode(raw: bytes) -> str:
        try:
            return raw.decode(errors=errors).rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error.reason})") from None

    return skipped.usable(raw_lines(), decode)


def read_columns(
    path: str | Path, columns: Sequence[str], skipped: Skipped
) -> Iterator[Placed[list[str]]]:
    """Each row's fields of the named columns; blank lines are passed over.

    Columns may come in any order and with others. ValueError for a header without them; a line that
    is no row is skipped.
    """
    # Other columns may hold other text: bytes that are not UTF-8 do no harm there.
    lines = read_lines(path, skipped, errors="surrogateescape")
    _, header = next(lines, ("", ""))
    try:
        names = [name.strip().lower() for name in next(csv.reader([header]), [])]
    except csv.Error as error:  # line ends of old Macs, or a field that is too long
        raise ValueError(f"{path}, line 1: {header!r:.80} is no header of a CSV: {error}") from None
    if missing := [name for name in columns if name.lower() not in names]:
        raise ValueError(
            f"{path}, line 1: no column {', '.join(missing)} in the header {header!r:.200}"
        )
    places = [names.index(name.lower()) for name in columns]

    def split(line: str) -> list[str]:
        try:
            fields = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise ValueError(str(error)) from None
        if len(fields) != len(names):
            raise ValueError(f"{len(names)} fields expected, got {len(fields)} in {line!r:.80}")
        return [fields[place] for place in places]

    return skipped.usable(((place, line) for place, line in lines if line.strip()), split)


def read_json_lines(path: str | Path, skipped: Skipped) -> Iterator[Placed[object]]:
    """The JSON value of each line; blank lines are passed over, one that is not JSON is skipped."""

    def parse(line: str) -> object:
        try:
            return _JSON.decode(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from None

    lines = read_lines(path, skipped)
    return skipped.usable(((place, line) for place, line in lines if line.strip()), parse)


def read_json_records(
    path: str | Path, skipped: Skipped, is_record: Callable[[object], bool]
) -> Iterator[Placed[object]]:
    """The elements of a file that is one JSON list, or the values of JSON lines."""
    with require_text(path).open("rb") as file:
        is_list = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return iter(JsonList(path, skipped, is_record)) if is_list else read_json_lines(path, skipped)


class JsonList:
    """Iterates once over the elements of a JSON list in a file too large to be held twice.

    An element that is not JSON is skipped, and with it all up to the next object that `is_record`
    knows; so is one in which the file ends. Bytes that are not UTF-8 become lone surrogates.
    """

    def __init__(
        self,
        path: str | Path,
        skipped: Skipped,
        is_record: Callable[[object], bool],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._path = require_text(path)
        self._skipped = skipped
        self._is_record = is_record
        self._chunk_bytes = chunk_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._text = ""
        self._position = 0
        self._line, self._counted = 1, 0  # the line of a position in the text

    def __iter__(self) -> Iterator[Placed[object]]:
        with self._path.open("rb") as file:
            if (opening := self._next_character(file)) != "[":
                raise ValueError(f"{self._path}: a JSON list expected, got {opening!r}")
            self._position += 1
            index, is_lost = 0, False
            while (character := self._next_character(file)) != "]":
                place = f"record {index} in line {self._line_here()}"
                if not character:
                    self._skipped.add(place, "the file ends before its list")
                    return
                try:
                    value, end = _JSON.raw_decode(self._text, self._position)
                except (ValueError, RecursionError) as error:
                    is_half = self._may_be_half(error)
                    if is_half and self._read_more(file):
                        continue
                    if not is_lost:
                        what = getattr(error, "msg", error)
                        reason = "the file ends in it" if is_half else f"not JSON: {what}"
                        self._skipped.add(place, reason)
                        index, is_lost = index + 1, True
                    if not self._find_next(file):
                        return
                    continue
                if end == len(self._text) and self._read_more(file):
                    continue  # a number that may go on
                if is_lost and not self._is_record(value):
                    if not self._find_next(file):
                        return
                    continue
                yield place, value
                index, is_lost = index + 1, False
                self._position = end
                if self._next_character(file) == ",":
                    self._position += 1
            self._position += 1
            if self._next_character(file):
                self._skipped.add(f"line {self._line_here()}", "text after the list")

    def _line_here(self) -> int:
        self._line += self._text.count("\n", self._counted, self._position)
        self._counted = self._position
        return self._line

    def _may_be_half(self, error: Exception) -> bool:
        if not isinstance(error, json.JSONDecodeError):
            return False
        if error.msg.startswith("Unterminated string"):
            return True
        return error.pos >= len(self._text) - _LONGEST_HALF

    def _find_next(self, file: BinaryIO) -> bool:
        """Move to the next object, which may be an element; False where none follows."""
        self._position += 1
        while (found := _MAYBE_NEXT.search(self._text, self._position)) is None:
            # What ends one object may be all that is there of the way to the next.
            self._position = max(self._position, len(self._text.rstrip()) - 1)
            if not self._read_more(file):
                return False
        self._position = found.end()
        return True

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
        self._line_here()
        self._text, self._position, self._counted = rest + self._decode(raw), 0, 0
        return True
