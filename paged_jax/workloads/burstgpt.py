"""The BurstGPT traces of ChatGPT and GPT-4: CSV with Timestamp, Request and Response tokens."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paged_jax.workloads.files import line_error, read_columns, token_count, whole_number
from paged_jax.workloads.request import VocabRange, WorkloadRequest, random_token_ids

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True)
class BurstGPTRow:
    arrival_s: float  # after the start of the collection, not of the file
    num_prompt_tokens: int
    num_output_tokens: int


def read_burstgpt(path: str | Path) -> tuple[list[BurstGPTRow], int]:
    """All rows with a response by time, and how many failed: their response has 0 tokens.

    ValueError names the first line that does not parse.
    """
    rows: list[BurstGPTRow] = []
    num_failed = 0
    for number, (timestamp, request, response) in read_columns(path, COLUMNS):
        try:
            arrival_s = _seconds(timestamp)
            if whole_number(response, "Response tokens", 0) == 0:
                num_failed += 1
                continue
            row = BurstGPTRow(
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


def burstgpt_requests(
    rows: Sequence[BurstGPTRow], *, vocab: VocabRange, seed: int, ignore_eos: bool = True
) -> Iterator[WorkloadRequest]:
    """Requests of the traced lengths and times, with random prompts."""
    for index, row in enumerate(rows):
        # A generator for each request: its prompt does not depend on which others are read.
        rng = np.random.default_rng([seed, index])
        prompt = tuple(random_token_ids(rng, row.num_prompt_tokens, vocab))
        yield WorkloadRequest(prompt, row.num_output_tokens, ignore_eos, row.arrival_s)
