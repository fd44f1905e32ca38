"""The tokens of sequences whose sampling looks back at them, kept on the device."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.executor.buckets import bucket_of
from paged_jax.scheduling.request import Sequence
from paged_jax.steps.logits import NO_SLOT
from paged_jax.steps.model_steps import remember_step


class Histories:
    """Gives slots of the history to sequences, and writes their tokens when they get one.

    From then on each decode step adds the token that it is given, so that a sequence's tokens are
    sent once, and a step that runs ahead of the host needs none of them from there. What a failed
    step has written is written again when it is planned again.

    array: `i32[max_num_seqs, max_model_len]`, the history that steps take.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        buckets: Seq[int],
        require: Callable[[str, int], None] = lambda step, size: None,
    ):
        """`buckets`: sizes of `remember_step`; `require` has a step of a size compiled."""
        self._shape = max_num_seqs, max_model_len
        self.reset()
        self.buckets = buckets
        self._require = require

    def reset(self) -> None:
        """Start again with an empty history."""
        self.array: jax.Array = jnp.zeros(self._shape, jnp.int32)
        self._slots: dict[int, int] = {}  # by the sequence's id, also of some that have ended

    def slots(
        self, seqs: Seq[Sequence], *, beside: Iterable[Sequence] = (), anew: bool = False
    ) -> list[int]:
        """The slot of each of `seqs` that needs its history, NO_SLOT for others.

        Together with those `beside` they are all sequences that a batch samples: the slots of
        others are free. With `anew` the host has tokens that no decode step has been given.
        """
        wanting = [seq for seq in seqs if seq.needs_history]
        if not wanting:
            return [NO_SLOT] * len(seqs)
        if lacking := [seq for seq in wanting if anew or seq.seq_id not in self._slots]:
            kept = {seq.seq_id for seq in (*seqs, *beside)}
            self._slots = {name: slot for name, slot in self._slots.items() if name in kept}
            self._write(lacking)
        return [self._slots[seq.seq_id] if seq.needs_history else NO_SLOT for seq in seqs]

    def _write(self, seqs: list[Sequence]) -> None:
        taken = set(self._slots.values())
        free = (slot for slot in range(self._shape[0]) if slot not in taken)
        for _, group in groupby(seqs, key=_holder_of_tokens):
            alike = list(group)
            slots = [self._slots.get(seq.seq_id) for seq in alike]
            found = [next(free) if slot is None else slot for slot in slots]
            tokens = np.zeros(self._shape[1], np.int32)
            tokens[: alike[0].num_tokens] = alike[0].token_ids
            bucket = bucket_of(self.buckets, len(found))
            self._require("remember", bucket)
            padded = np.full(bucket, NO_SLOT, np.int32)
            padded[: len(found)] = found
            self.array = remember_step(self.array, tokens, padded)
            # Only now: what raises before has written nothing.
            self._slots |= {seq.seq_id: slot for seq, slot in zip(alike, found, strict=True)}


def _holder_of_tokens(seq: Sequence) -> int:
    """Equal for sequences of the same tokens: those of a request that begin with its prompt."""
    return id(seq.request) if seq.is_fresh else id(seq)
