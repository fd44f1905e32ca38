"""Reads a Chrome trace as strictly as any viewer may, and what it says of requests."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass
class Drawn:
    """A span; times in microseconds."""

    name: str
    start: int
    end: int
    args: dict
    inner: list["Drawn"] = field(default_factory=list)


def read_trace(path: Path) -> list[dict]:
    """The events, once each has been found to be what the format asks for."""
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    for event in events:
        assert event["ph"] in {"X", "B", "E", "i", "C", "M"}
        for key in ("pid", "tid", "ts"):
            assert isinstance(event[key], int)
            assert event[key] >= (key != "ts")
        assert isinstance(event["args"], dict)
        if event["ph"] != "E":
            assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, int) for value in event["args"].values())
    _check_names(events)
    return events


def _check_names(events: list[dict]) -> None:
    """Every group and every track is named once, before anything is drawn on it."""
    processes, threads = set(), set()
    for event in events:
        track = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert set(event["args"]) <= {"name", "sort_index"}
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes.add(event["pid"])
            elif event["name"] == "thread_name":
                assert track not in threads
                threads.add(track)
        else:
            assert event["pid"] in processes
            assert event["ph"] == "C" or track in threads


def spans(events: list[dict]) -> dict[str, list[Drawn]]:
    """The outermost spans by the name of their track, once all are seen to begin, end and nest."""
    names, tracks = {}, defaultdict(list)
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
        if event["ph"] in "XBE":
            tracks[event["pid"], event["tid"]].append(event)
    assert len(set(names.values())) == len(names)
    return {names[track]: _nested(drawn) for track, drawn in tracks.items()}


def _nested(events: list[dict]) -> list[Drawn]:
    outermost: list[Drawn] = []
    open_spans: list[Drawn] = []
    complete: list[Drawn] = []  # those of one event, which may hold others
    time = 0
    for event in events:
        assert event["ts"] >= time, "time runs backwards on a track"
        time = event["ts"]
        while complete and complete[-1].end <= time:
            complete.pop()
        if event["ph"] == "E":
            span = open_spans.pop()
            span.end = time
            span.args |= event["args"]
            continue
        end = time + event["dur"] if event["ph"] == "X" else -1
        span = Drawn(event["name"], time, end, dict(event["args"]))
        around = (complete or open_spans)[-1] if complete or open_spans else None
        (outermost if around is None else around.inner).append(span)
        if event["ph"] == "X":
            assert around is None or around.end == -1 or end <= around.end, "spans overlap"
            complete.append(span)
        else:
            open_spans.append(span)
    assert not open_spans, "what begins must end"
    return outermost


def requests_in(events: list[dict]) -> dict[str, Drawn]:
    """The span of each request, once its phases are seen to fill it without a gap."""
    found: dict[str, Drawn] = {}
    for track, drawn in spans(events).items():
        if not track.startswith("requests, lane "):
            continue
        for before, after in pairwise(drawn):
            assert before.end <= after.start
        for span in drawn:
            assert span.name not in found
            found[span.name] = span
            edges = [edge for phase in span.inner for edge in (phase.start, phase.end)]
            assert edges[0] == span.start
            assert edges[-1] == span.end
            assert edges[1:-1:2] == edges[2::2]
            assert {phase.name for phase in span.inner} <= {
                "waiting",
                "prefill",
                "running",
                "swapped",
            }
    return found
