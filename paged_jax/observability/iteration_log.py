"""A line of JSON for each iteration, to be followed while the engine runs or read afterwards."""

import dataclasses
import json
from pathlib import Path

from paged_jax.memory.usage import MemoryUsage
from paged_jax.observability.observer import IterationStats, Observer, open_output
from paged_jax.outputs import RequestOutput


class IterationLog(Observer):
    """Writes `IterationStats` to a file, a line each: `{"index": 0, "start_s": 1.5, ...}`.

    "usage" says how the slots were used, and "ended" which requests have ended since the line
    before, with their reasons. Every line is in the file when its iteration is over.

    path: the log's file; ValueError if it cannot be written.
    """

    wants_stats = True

    def __init__(self, path: str | Path):
        self._file = open_output(path, by_line=True)
        self._ended: dict[str, str | None] = {}

    def on_request_ended(self, output: RequestOutput, time_s: float) -> None:
        self._ended[output.request_id] = output.error or output.finish_reason

    def on_iteration(self, stats: IterationStats) -> None:
        line = {field: getattr(stats, field) for field in _FIELDS}
        line["usage"] = {field: getattr(stats.usage, field) for field in _USAGE_FIELDS}
        line["ended"], self._ended = self._ended, {}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()


_FIELDS = [field.name for field in dataclasses.fields(IterationStats)]
_USAGE_FIELDS = [field.name for field in dataclasses.fields(MemoryUsage)]
