"""The decode step's arrays, kept from one iteration to the next.

Rows stand in the order of the scheduler's running sequences. While the same sequences run, an
iteration adds one token to each row and, every `block_size` tokens, one block to its table; rows
move only when a sequence joins or leaves. Copy-on-write replaces the last block of a table.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np

from paged_jax.executor.buckets import bucket_of, decode_buckets, padded
from paged_jax.executor.histories import Histories
from paged_jax.executor.sampling_rows import SamplingArrays, sampling_row, sampling_rows
from paged_jax.memory.interface import MemoryManager
from paged_jax.scheduling.request import Sequence
from paged_jax.steps.model_steps import hold_step, take_step
from paged_jax.steps.sampling import Sampled, SamplingBatch


class TokenFeed:
    """Brings an iteration's sampled tokens into the order of the next one's decode rows.

    While the rows stay the same, the tokens are passed on as they are. Otherwise they are gathered
    from an array `i32[2 * max_num_seqs]` of the iteration's decode tokens, then the tokens of its
    prompts: one program for each bucket, not one for each pair of buckets.
    """

    def __init__(self, max_num_seqs: int, require: Callable[[str, int], None]):
        """`require` is called with a step's name and size, and has it compiled."""
        self._max_num_seqs = max_num_seqs
        self._require = require
        self._empty: jax.Array | None = None

    @property
    def empty(self) -> jax.Array:
        """`i32[2 * max_num_seqs]` zeros on the device."""
        if self._empty is None:
            self._empty = jax.device_put(np.zeros(2 * self._max_num_seqs, np.int32))
        return self._empty

    def tokens(
        self, seqs: list[Sequence], steps: Seq[tuple[list[Sequence], Sampled]], num_rows: int
    ) -> jax.Array:
        """`i32[num_rows]`: the token that `steps` sampled for each of `seqs`, then anything."""
        if len(steps) == 1 and steps[0][0] == seqs and steps[0][1].tokens.shape[0] == num_rows:
            return steps[0][1].tokens
        held = self.empty
        places: dict[int, int] = {}  # index in `held` of each sequence's token
        for start, (sampled_seqs, sampled) in zip((0, self._max_num_seqs), steps, strict=False):
            self._require("hold", sampled.tokens.shape[0])
            held = hold_step(held, sampled.tokens, np.int32(start))
            places |= {seq.seq_id: start + row for row, seq in enumerate(sampled_seqs)}
        self._require("take", num_rows)
        return take_step(held, padded([places[seq.seq_id] for seq in seqs], num_rows))


class DecodeRows:
    """Mirrors running sequences into static-shaped arrays.

    `block_tables`: `i32[max_num_seqs, M]`; unused rows are zero.
    """

    def __init__(
        self,
        memory: MemoryManager,
        sampling: SamplingArrays,
        histories: Histories,
        *,
        max_num_seqs: int,
        max_model_len: int,
        min_rows: int = 1,
    ):
        self._memory = memory
        self._sampling_arrays = sampling
        self._histories = histories
        self._block_size = memory.block_size
        self.buckets = decode_buckets(max_num_seqs, min_rows)
        self.block_tables = np.zeros(
            (max_num_seqs, -(-max_model_len // memory.block_size)), np.int32
        )
        self._seqs: list[Sequence] = []
        self._num_blocks = np.zeros(max_num_seqs, np.int32)  # mirrored blocks of each row
        self._params = sampling_rows([], max_num_seqs)
        self._mirrors: tuple[tuple[np.ndarray, Any], ...] = (  # (array, value of unused rows)
            (self.block_tables, 0),
            (self._num_blocks, 0),
            (self._params, sampling_rows([], 1)),
        )
        self._had_copies = False  # at the last update
        self._sampling: SamplingBatch | None = None
        self.has_constraints = False  # whether any row has

    def update(
        self, seqs: list[Sequence], *, tables_changed: bool = False, is_ahead: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, SamplingBatch]:
        """(tokens, positions, block tables, context lengths, sampling) of the bucket's rows.

        Call it, or `forget`, in every iteration: a sequence that misses one, because it was
        preempted, comes back with another table.

        tables_changed: copies have replaced blocks.
        is_ahead: each sequence has one more token, which the host does not know yet. The tokens are
            zeros then.

        The arrays do not change while a step may be reading them. Sampling has no masks yet.
        """
        n = len(seqs)
        bucket = bucket_of(self.buckets, n)
        if seqs != self._seqs:
            self._move_rows(seqs)
        if self._sampling is None:
            self._set_sampling(bucket)
        # Copies that were not made, because the step failed, may since have become needless.
        if tables_changed or self._had_copies:
            self._refresh_tables()
        self._had_copies = tables_changed
        tokens = np.zeros(bucket, np.int32)
        context_lens = np.zeros(bucket, np.int32)
        context_lens[:n] = [len(seq.token_ids) for seq in seqs]
        if is_ahead:
            context_lens[:n] += 1
        else:
            tokens[:n] = [seq.token_ids[-1] for seq in seqs]
        too_short = self._num_blocks[:n] * self._block_size < context_lens[:n]
        for row in np.flatnonzero(too_short).tolist():
            self._grow_table(row)
        positions = np.maximum(context_lens - 1, 0)
        assert self._sampling is not None
        tables = self.block_tables[:bucket].copy()
        return tokens, positions, tables, context_lens, self._sampling

    def forget(self) -> None:
        """Note an iteration without decodes."""
        if self._seqs:
            self._move_rows([])

    def _refresh_tables(self) -> None:
        for row, seq in enumerate(self._seqs):
            if last := self._num_blocks[row]:
                blocks = self._memory.block_table(seq.seq_id)
                if blocks[0] != self.block_tables[row, 0]:  # contiguous memory has moved as a whole
                    self.block_tables[row, :last] = blocks[:last]
                self.block_tables[row, last - 1] = blocks[last - 1]

    def _grow_table(self, row: int) -> None:
        blocks = self._memory.block_table(self._seqs[row].seq_id)
        mirrored = self._num_blocks[row]
        self.block_tables[row, mirrored : len(blocks)] = blocks[mirrored:]
        self._num_blocks[row] = len(blocks)

    def _move_rows(self, seqs: list[Sequence]) -> None:
        """Bring rows into the order of `seqs`; new sequences start with no blocks mirrored."""
        old_rows = {seq.seq_id: row for row, seq in enumerate(self._seqs)}
        sources = [old_rows.get(seq.seq_id, -1) for seq in seqs]
        n = max(len(seqs), len(self._seqs))
        for array, unused in self._mirrors:
            moved = array[sources]
            array[:n] = unused
            array[: len(seqs)] = moved
        for row, seq in enumerate(seqs):
            if sources[row] < 0:
                self.block_tables[row] = 0
                self._num_blocks[row] = 0
                self._params[row] = sampling_row(seq)
        self._seqs = seqs
        self._sampling = None

    def _set_sampling(self, bucket: int) -> None:
        rows = self._params[:bucket].copy()
        self.has_constraints = bool(rows["is_masked"].any())
        slots = self._histories.slots(self._seqs)
        # It stays on the device until rows change.
        self._sampling = jax.device_put(self._sampling_arrays.batch(rows, self._seqs, slots))
