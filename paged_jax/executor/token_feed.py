"""Sampled tokens that stay on the device: the input of decodes planned before they are known."""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import jax
import numpy as np

from paged_jax.decode import hold_step, take_step
from paged_jax.executor.buckets import padded
from paged_jax.sampling import Sampled
from paged_jax.scheduling.request import Sequence


class TokenFeed:
    """Brings an iteration's sampled tokens into the order of the next one's decode rows.

    As long as the rows stay the same the tokens are passed on as they are. Otherwise they are
    gathered from an array that holds those of the iteration's decodes, then those of its prompts,
    ``i32[2 * max_num_seqs]``: one program for each bucket, not one for each pair of them.
    """

    def __init__(self, max_num_seqs: int, require: Callable[[str, int], None]):
        """``require`` sees to it that a step of some size is compiled."""
        self._max_num_seqs = max_num_seqs
        self._require = require
        self._empty: jax.Array | None = None

    @property
    def empty(self) -> jax.Array:
        """``i32[2 * max_num_seqs]`` zeros on the device."""
        if self._empty is None:
            self._empty = jax.device_put(np.zeros(2 * self._max_num_seqs, np.int32))
        return self._empty

    def tokens(
        self, seqs: list[Sequence], steps: Seq[tuple[list[Sequence], Sampled]], num_rows: int
    ) -> jax.Array:
        """``i32[num_rows]``: what ``steps`` have sampled for each of ``seqs``, then anything."""
        if len(steps) == 1 and steps[0][0] == seqs and steps[0][1].tokens.shape[0] == num_rows:
            return steps[0][1].tokens
        held = self.empty
        places: dict[int, int] = {}  # of each sequence's token in it
        for start, (sampled_seqs, sampled) in zip((0, self._max_num_seqs), steps, strict=False):
            self._require("hold", sampled.tokens.shape[0])
            held = hold_step(held, sampled.tokens, np.int32(start))
            places |= {seq.seq_id: start + row for row, seq in enumerate(sampled_seqs)}
        self._require("take", num_rows)
        return take_step(held, padded([places[seq.seq_id] for seq in seqs], num_rows))
