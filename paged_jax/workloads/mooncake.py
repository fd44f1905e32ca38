"""The Mooncake traces: JSONL with the ids of shared prefix blocks of 512 tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paged_jax.workloads.files import line_error, read_lines, token_count, whole_number
from paged_jax.workloads.request import TracedRequest, VocabRange, WorkloadRequest, random_token_ids

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class MooncakeRow(TracedRequest):
    hash_ids: tuple[int, ...]  # one for each 512 tokens of the prompt, the last may be partial


def _parse(line: str) -> MooncakeRow:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object expected, got {line[:80]!r}")
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    if missing := [name for name in names if name not in record]:
        raise ValueError(f"no {', '.join(missing)}")
    hash_ids = record["hash_ids"]
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids must be a list, got {hash_ids!r}")
    row = MooncakeRow(
        whole_number(record["timestamp"], "timestamp", 0) / 1000,
        token_count(record["input_length"], "input_length"),
        token_count(record["output_length"], "output_length"),
        tuple(whole_number(hash_id, "a hash id", 0) for hash_id in hash_ids),
    )
    num_blocks = -(-row.num_prompt_tokens // HASH_BLOCK_TOKENS)
    if len(hash_ids) != num_blocks:
        raise ValueError(
            f"input_length {row.num_prompt_tokens} makes {num_blocks} blocks of "
            f"{HASH_BLOCK_TOKENS}, got {len(hash_ids)} hash_ids"
        )
    return row


def read_mooncake(path: str | Path) -> list[MooncakeRow]:
    """All rows of the trace. ValueError names the first line that does not parse."""
    rows: list[MooncakeRow] = []
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = _parse(line)
            if rows and row.arrival_s < rows[-1].arrival_s:
                raise ValueError(f"timestamp {row.arrival_s * 1000:.0f} lies before the line above")
        except json.JSONDecodeError as error:
            raise line_error(path, number, f"not JSON: {error.msg}, column {error.colno}") from None
        except ValueError as error:
            raise line_error(path, number, str(error)) from None
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no request in it")
    return rows


def mooncake_requests(
    rows: Sequence[MooncakeRow], *, vocab: VocabRange, seed: int, ignore_eos: bool = True
) -> Iterator[WorkloadRequest]:
    """Requests whose prompts share a block of 512 tokens wherever the trace repeats a hash id."""
    for row in rows:
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            rng = np.random.default_rng([seed, hash_id])
            prompt += random_token_ids(rng, HASH_BLOCK_TOKENS, vocab)
        del prompt[row.num_prompt_tokens :]
        yield WorkloadRequest(tuple(prompt), row.num_output_tokens, ignore_eos, row.arrival_s)
