"""Writes Chrome's trace event format, which Perfetto and chrome://tracing open.

The file is an array of events, each on its own line, written as they come: without the bracket
that `close` adds, after a crash, viewers still open it. Times are whole microseconds.
"""

import json
from bisect import insort
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class Lanes:
    """Numbers lanes from 0; a request takes the lowest that has been free since its arrival."""

    def __init__(self) -> None:
        self.num_lanes = 0
        self._free: list[tuple[int, int]] = []  # (lane, time from which it is free), by lane

    def take(self, time: int) -> int:
        """A lane on which nothing has been drawn after `time`."""
        for index, (lane, free_from) in enumerate(self._free):
            if free_from <= time:
                del self._free[index]
                return lane
        self.num_lanes += 1
        return self.num_lanes - 1

    def give_back(self, lane: int, time: int) -> None:
        """What was drawn on the lane ends at `time`."""
        insort(self._free, (lane, time))


def open_output(path: str | Path, *, by_line: bool = False) -> TextIO:
    """A new file; each line is in it at once if `by_line`. ValueError if it cannot be written."""
    try:
        return Path(path).open("w", buffering=1 if by_line else -1)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
Args = Mapping[str, Any]


class TraceFile:
    """Events on tracks, which are threads (`tid`) of processes (`pid`) in the format's words.

    Numbers are positive, as 0 is an idle processor to Perfetto. Spans of one track must nest.
    ValueError for a path that cannot be written.
    """

    def __init__(self, path: str | Path):
        self._file = open_output(path)
        self._separator = "[\n"

    def process(self, pid: int, name: str) -> None:
        """Name a group of tracks; groups are sorted by number."""
        for event, args in (("process_name", {"name": name}), ("process_sort_index", _sort(pid))):
            self._write({"ph": "M", "pid": pid, "tid": pid, "ts": 0, "name": event, "args": args})

    def track(self, pid: int, tid: int, name: str) -> None:
        """Name a track; tracks are sorted by number."""
        for event, args in (("thread_name", {"name": name}), ("thread_sort_index", _sort(tid))):
            self._write({"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": event, "args": args})

    def span(self, pid: int, tid: int, name: str, start: int, end: int, args: Args) -> None:
        """Something that took from `start` to `end`."""
        if end < start:
            raise ValueError(f"the span {name!r} ends at {end} us, before its start at {start} us")
        event = {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": end - start, "name": name}
        self._write({**event, "args": args})

    def begin(self, pid: int, tid: int, name: str, time: int, args: Args) -> None:
        """Something that goes on until `end`."""
        self._write({"ph": "B", "pid": pid, "tid": tid, "ts": time, "name": name, "args": args})

    def end(self, pid: int, tid: int, time: int, args: Args) -> None:
        """The end of what began last on the track and goes on."""
        self._write({"ph": "E", "pid": pid, "tid": tid, "ts": time, "args": args})

    def instant(self, pid: int, tid: int, name: str, time: int, args: Args) -> None:
        event = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": time, "name": name}
        self._write({**event, "args": args})

    def counter(self, pid: int, name: str, time: int, values: Mapping[str, int]) -> None:
        """Values from this time on, drawn as one stack or one line each."""
        event = {"ph": "C", "pid": pid, "tid": pid, "ts": time, "name": name}
        self._write({**event, "args": values})

    def close(self) -> None:
        """Complete the file; nothing happens if it is closed."""
        if not self._file.closed:
            self._file.write("[]\n" if self._separator == "[\n" else "\n]\n")
            self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(self._separator + _encode(event))
        self._separator = ",\n"


def _sort(index: int) -> dict[str, int]:
    return {"sort_index": index}
