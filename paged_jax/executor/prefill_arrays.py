"""The prefill step's arrays: chunks of several prompts packed, and laid out in rows."""

from typing import NamedTuple

import numpy as np

from paged_jax.executor.buckets import padded
from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.batch import PrefillChunk
from paged_jax.steps.attention import PrefillIndex


class PrefillArrays(NamedTuple):
    """Arguments of `paged_jax.steps.model_steps.prefill_step`."""

    tokens: np.ndarray  # i32[N]
    positions: np.ndarray  # i32[N]
    layout: PrefillIndex
    last: np.ndarray  # i32[L]


class PrefillShape(NamedTuple):
    """Static sizes of a prefill step; derived from N, so that N alone chooses the program."""

    num_tokens: int  # N
    row_tokens: int  # T
    num_rows: int  # R

    @classmethod
    def of(cls, num_tokens: int, max_chunks: int) -> "PrefillShape":
        """Rows of 8 to 64 tokens, as many as the worst split of N into chunks takes."""
        row_tokens = 8
        while row_tokens < 64 and row_tokens * 16 <= num_tokens:
            row_tokens *= 2
        # Chunks of one token, each in a row of its own, and one chunk of all the rest.
        num_chunks = min(max_chunks, num_tokens)
        return cls(num_tokens, row_tokens, num_chunks + (num_tokens - num_chunks) // row_tokens)


def prefill_arrays(
    chunks: list[PrefillChunk],
    shape: PrefillShape,
    memory: MemoryManager,
    *,
    max_chunks: int,
    max_blocks: int,
) -> PrefillArrays:
    """Pack the chunks; padded tokens go to the null block and padded rows see nothing."""
    N, T, R = shape
    S = memory.block_size
    tokens = np.zeros(N, np.int32)
    positions = np.zeros(N, np.int32)
    slots = np.zeros(N, np.int32)
    place_of = np.zeros(N, np.int32)
    token_of = np.full(R * T, N, np.int32)
    block_tables = np.zeros((R, max_blocks), np.int32)
    context_lens = np.zeros(R, np.int32)
    query_starts = np.zeros(R, np.int32)
    last = []

    at, row = 0, 0  # next packed token, next row
    for chunk in chunks:
        start, n = chunk.start, chunk.num_tokens
        span = np.arange(start, start + n, dtype=np.int32)
        blocks = np.array(memory.block_table(chunk.seq.seq_id), np.int32)
        num_rows = -(-n // T)
        packed, rows = slice(at, at + n), slice(row, row + num_rows)
        tokens[packed] = chunk.seq.token_ids[start : start + n]
        positions[packed] = span
        slots[packed] = blocks[span // S] * S + span % S
        place_of[packed] = row * T + np.arange(n)
        token_of[row * T : row * T + n] = np.arange(at, at + n)
        block_tables[rows, : len(blocks)] = blocks
        query_starts[rows] = start + T * np.arange(num_rows)
        context_lens[rows] = np.minimum(query_starts[rows] + T, start + n)
        at += n
        row += num_rows
        last.append(at - 1)

    layout = PrefillIndex(
        slots, token_of.reshape(R, T), place_of, block_tables, context_lens, query_starts
    )
    return PrefillArrays(tokens, positions, layout, padded(last, max_chunks))
