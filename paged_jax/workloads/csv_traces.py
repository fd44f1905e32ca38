"""Traces as CSV: Azure's of LLM inference, and BurstGPT's of ChatGPT and GPT-4."""

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from paged_jax.workloads.files import read_columns
from paged_jax.workloads.numbers import microseconds, token_count
from paged_jax.workloads.records import Skipped
from paged_jax.workloads.request import TracedRequest

# Columns of the time, the prompt's tokens and the output's.
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


def read_azure(path: str | Path) -> tuple[list[TracedRequest], list[str]]:
    """The rows with an output in order of time, timed from the first; a note on those skipped."""
    return _read(path, AZURE, from_first=True)


def read_burstgpt(path: str | Path) -> tuple[list[TracedRequest], list[str]]:
    """The rows with a response in order of time, and a note on those skipped.

    Times count from the start of the collection, not of the file.
    """
    return _read(path, BURSTGPT, from_first=False)


def _read(
    path: str | Path, columns: Sequence[str], *, from_first: bool
) -> tuple[list[TracedRequest], list[str]]:
    def parse(fields: Sequence[str]) -> tuple[int, int, int]:
        time, prompt, output = fields
        return (
            microseconds(time, columns[0]),
            token_count(prompt, columns[1]),
            token_count(output, columns[2]),
        )

    skipped = Skipped(path)
    rows, notes = skipped.finish(skipped.usable(read_columns(path, columns, skipped), parse))
    rows.sort(key=itemgetter(0))
    start = rows[0][0] if from_first else 0
    return [TracedRequest((time - start) / 1e6, *lengths) for time, *lengths in rows], notes
