"""The Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

from datetime import datetime
from pathlib import Path

from paged_jax.workloads.files import line_error, read_columns, token_count
from paged_jax.workloads.request import TracedRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: str | Path) -> list[TracedRequest]:
    """All rows, timed from the first. ValueError names the first line that does not parse."""
    rows: list[TracedRequest] = []
    first: datetime | None = None
    for number, (stamp, context, generated) in read_columns(path, COLUMNS):
        try:
            time = datetime.fromisoformat(stamp.strip())
            first = first or time
            row = TracedRequest(
                (time - first).total_seconds(),
                token_count(context, "ContextTokens"),
                token_count(generated, "GeneratedTokens"),
            )
            if rows and row.arrival_s < rows[-1].arrival_s:
                raise ValueError(f"TIMESTAMP {stamp} lies before the line above it")
        # TypeError: a timestamp with a time zone minus one without.
        except (ValueError, TypeError) as error:
            raise line_error(path, number, str(error)) from None
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no request under the header")
    return rows
