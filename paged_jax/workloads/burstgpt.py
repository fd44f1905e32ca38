"""The BurstGPT traces of ChatGPT and GPT-4: CSV with Timestamp, Request and Response tokens."""

import math
from pathlib import Path

from paged_jax.workloads.files import line_error, read_columns, token_count, whole_number
from paged_jax.workloads.request import TracedRequest

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(path: str | Path) -> tuple[list[TracedRequest], int]:
    """The rows with a response, in order of time, and the number of requests without one.

    Times count from the start of the collection, not of the file. ValueError names the first line
    that does not parse.
    """
    rows: list[TracedRequest] = []
    num_failed = 0
    for number, (timestamp, request, response) in read_columns(path, COLUMNS):
        try:
            arrival_s = _seconds(timestamp)
            if whole_number(response, "Response tokens", 0) == 0:
                num_failed += 1
                continue
            row = TracedRequest(
                arrival_s,
                token_count(request, "Request tokens"),
                token_count(response, "Response tokens"),
            )
        except ValueError as error:
            raise line_error(path, number, str(error)) from None
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no request with a response under the header")
    return sorted(rows, key=lambda row: row.arrival_s), num_failed


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"Timestamp must be seconds of at least 0, got {text!r}")
    return seconds
