"""The Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from paged_jax.workloads.files import line_error, read_columns, token_count
from paged_jax.workloads.request import VocabRange, WorkloadRequest, random_token_ids

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class AzureRow:
    arrival_s: float  # after the first row
    num_prompt_tokens: int
    num_output_tokens: int


def read_azure(path: str | Path) -> list[AzureRow]:
    """All rows of the trace. ValueError names the first line that does not parse."""
    rows: list[AzureRow] = []
    first: datetime | None = None
    for number, (stamp, context, generated) in read_columns(path, COLUMNS):
        try:
            time = datetime.fromisoformat(stamp.strip())
            first = first or time
            row = AzureRow(
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


def azure_requests(
    rows: Sequence[AzureRow], *, vocab: VocabRange, seed: int, ignore_eos: bool = True
) -> Iterator[WorkloadRequest]:
    """Requests of the traced lengths and times, with random prompts."""
    for index, row in enumerate(rows):
        # A generator for each request: its prompt does not depend on which others are read.
        rng = np.random.default_rng([seed, index])
        prompt = tuple(random_token_ids(rng, row.num_prompt_tokens, vocab))
        yield WorkloadRequest(prompt, row.num_output_tokens, ignore_eos, row.arrival_s)
