"""The Mooncake traces: JSON lines with the ids of shared prefix blocks, mostly of 512 tokens."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import numpy as np

from paged_jax.workloads.files import read_json_lines
from paged_jax.workloads.numbers import microseconds, token_count, whole_number
from paged_jax.workloads.records import Skipped
from paged_jax.workloads.request import TracedRequest, VocabRange, WorkloadRequest, random_token_ids

HASH_BLOCK_TOKENS = 512  # of Mooncake's own traces
_SIZES = tuple(2**power for power in range(17))


@dataclass(frozen=True, slots=True)
class MooncakeRow(TracedRequest):
    hash_ids: tuple[int, ...]  # one for each block of the prompt, the last may be partial
    block_tokens: int = HASH_BLOCK_TOKENS


def _parse(record: object) -> MooncakeRow:
    if not isinstance(record, dict):
        raise ValueError(f"a JSON object expected, got {record!r:.80}")
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    if missing := [name for name in names if name not in record]:
        raise ValueError(f"no {', '.join(missing)}")
    hash_ids = record["hash_ids"]
    if not isinstance(hash_ids, list):
        raise ValueError(f"hash_ids must be a list, got {hash_ids!r:.80}")
    return MooncakeRow(
        microseconds(record["timestamp"], "timestamp", per_second=1000) / 1e6,
        token_count(record["input_length"], "input_length"),
        token_count(record["output_length"], "output_length"),
        tuple(whole_number(hash_id, "a hash id", 0) for hash_id in hash_ids),
    )


def _block_tokens(rows: Sequence[MooncakeRow]) -> int:
    """The power of two that makes as many blocks as there are ids in most rows."""
    fits = Counter(
        size
        for row in rows
        for size in _SIZES
        if -(-row.num_prompt_tokens // size) == len(row.hash_ids)
    )
    return max(_SIZES, key=lambda size: (fits[size], size == HASH_BLOCK_TOKENS))


def read_mooncake(path: str | Path) -> tuple[list[MooncakeRow], list[str]]:
    """All rows in order of time, and a note on those skipped.

    Times are in milliseconds. How many tokens a block has follows from the rows' lengths.
    """
    skipped = Skipped(path)
    placed = list(skipped.usable(read_json_lines(path, skipped), _parse))
    size = _block_tokens([row for _, row in placed])

    def check(row: MooncakeRow) -> MooncakeRow:
        num_blocks = -(-row.num_prompt_tokens // size)
        if len(row.hash_ids) != num_blocks:
            raise ValueError(
                f"input_length {row.num_prompt_tokens} makes {num_blocks} blocks of {size}, "
                f"got {len(row.hash_ids)} hash_ids"
            )
        return replace(row, block_tokens=size)

    rows, notes = skipped.finish(skipped.usable(placed, check))
    return sorted(rows, key=attrgetter("arrival_s")), notes


def mooncake_requests(
    rows: Sequence[MooncakeRow], *, vocab: VocabRange, seed: int, ignore_eos: bool = True
) -> Iterator[WorkloadRequest]:
    """Requests whose prompts share a block of tokens wherever the trace repeats a hash id."""
    for row in rows:
        prompt: list[int] = []
        for hash_id in row.hash_ids:
            rng = np.random.default_rng([seed, hash_id])
            prompt += random_token_ids(rng, row.block_tokens, vocab)
        del prompt[row.num_prompt_tokens :]
        yield WorkloadRequest(tuple(prompt), row.num_output_tokens, ignore_eos, row.arrival_s)
