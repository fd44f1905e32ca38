"""Sampling parameters of a batch's rows as arrays."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

import jax
import numpy as np

from paged_jax.outputs import error_text
from paged_jax.scheduling.request import Sequence
from paged_jax.steps.logits import MAX_BIASES, NO_SLOT, LogitRules, TokenBiases
from paged_jax.steps.sampling import SamplingBatch

# One row; names as in SamplingBatch and LogitRules. A flag is set there if any row sets it.
_VALUES = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.uint32,
    "num_prompt_tokens": np.int32,
}
_FLAGS = ("draws", "filters", "wants_logprobs")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_RULE_FLAGS = ("is_masked", "is_biased", "is_penalised")
ROW = np.dtype(
    [
        *_VALUES.items(),
        *((name, np.float32) for name in _PENALTIES),
        *((name, np.bool_) for name in (*_FLAGS, *_RULE_FLAGS, "is_processed")),
    ]
)
# Limits of the device's types; beyond them a parameter's effect does not change.
_MAX_INT = int(np.iinfo(np.int32).max)
_MAX_FLOAT = float(np.finfo(np.float32).max)


def sampling_rows(seqs: Iterable[Sequence], num_rows: int) -> np.ndarray:
    """Rows of `seqs`, then greedy rows up to `num_rows`: an array of `ROW`."""
    rows = np.zeros(num_rows, ROW)
    rows["top_p"] = rows["repetition_penalty"] = 1
    for i, seq in enumerate(seqs):
        rows[i] = sampling_row(seq)
    return rows


def sampling_row(seq: Sequence) -> tuple[object, ...]:
    """The fields of `ROW`, in their order."""
    params = seq.request.params
    draws = not params.is_greedy
    return (
        min(params.temperature, _MAX_FLOAT),
        min(params.top_k, _MAX_INT),
        params.top_p,
        params.min_p,
        seq.sampling_seed,
        seq.num_prompt_tokens,
        min(params.repetition_penalty, _MAX_FLOAT),
        params.presence_penalty,
        params.frequency_penalty,
        draws,
        draws and bool(params.top_k or params.top_p < 1 or params.min_p),
        params.wants_candidates,
        seq.constraint is not None,
        bool(params.logit_bias) or params.min_tokens > 0,
        params.has_penalties,
        bool(params.processor_names),
    )


class SamplingArrays:
    """Makes the batches that steps take, for a vocabulary and the names of logits processors."""

    def __init__(self, vocab_size: int, processor_names: Seq[str] = ()):
        self.vocab_size = vocab_size
        self._processor_names = processor_names
        self._no_rules: dict[int, LogitRules] = {}  # by number of rows, on the device

    def batch(self, rows: np.ndarray, seqs: Seq[Sequence], slots: Seq[int]) -> SamplingBatch:
        """The batch of `rows`, an array of `ROW`, the first of which are those of `seqs`.

        slots: of the sequences' tokens in the history. The masks are still to be replaced where a
            sequence has a constraint.
        """
        return SamplingBatch(
            **{name: rows[name] for name in _VALUES},
            **{name: np.asarray(rows[name].any()) for name in _FLAGS},
            rules=self._rules(rows, seqs, slots),
        )

    def _rules(self, rows: np.ndarray, seqs: Seq[Sequence], slots: Seq[int]) -> LogitRules:
        """What no row has stays on the device from one batch to the next."""
        num_rows = len(rows)
        if num_rows not in self._no_rules:
            self._no_rules[num_rows] = jax.device_put(self._empty_rules(num_rows))
        nothing = self._no_rules[num_rows]
        flags = {name: np.asarray(rows[name].any()) for name in _RULE_FLAGS}
        is_processed = rows["is_processed"].any()
        if not (is_processed or any(flags.values())):
            return nothing
        padded_slots = np.full(num_rows, NO_SLOT, np.int32)
        padded_slots[: len(slots)] = slots
        processors = np.zeros((num_rows, len(self._processor_names)), np.bool_)
        for row in np.flatnonzero(rows["is_processed"]).tolist():
            wanted = seqs[row].request.params.processor_names
            processors[row] = [name in wanted for name in self._processor_names]
        return replace(
            nothing,
            **{name: rows[name] for name in _PENALTIES},
            **flags,
            is_changed=np.asarray(True),
            slots=padded_slots,
            biases=token_biases(seqs, num_rows) if flags["is_biased"] else nothing.biases,
            processors=processors,
        )

    def _empty_rules(self, num_rows: int) -> LogitRules:
        rows = sampling_rows([], num_rows)
        return LogitRules(
            **{name: rows[name] for name in _PENALTIES},
            **{name: np.asarray(False) for name in ("is_changed", *_RULE_FLAGS)},
            slots=np.full(num_rows, NO_SLOT, np.int32),
            biases=token_biases([], num_rows),
            allowed=np.zeros((num_rows, -(-self.vocab_size // 32)), np.uint32),
            processors=np.zeros((num_rows, len(self._processor_names)), np.bool_),
        )


def token_biases(seqs: Seq[Sequence], num_rows: int) -> TokenBiases:
    """Of `logit_bias`, and of end tokens that `min_tokens` leaves out."""
    tokens, until = (np.zeros((num_rows, MAX_BIASES), np.int32) for _ in range(2))
    values = np.zeros((num_rows, MAX_BIASES), np.float32)
    for row, seq in enumerate(seqs):
        params = seq.request.params
        biases = dict(params.logit_biases)
        n = len(biases)
        tokens[row, :n] = list(biases)
        values[row, :n] = np.clip(list(biases.values()), -_MAX_FLOAT, _MAX_FLOAT)
        until[row, :n] = _MAX_INT
        if params.min_tokens:
            end = n + len(seq.end_token_ids)
            tokens[row, n:end] = list(seq.end_token_ids)
            values[row, n:end] = -np.inf
            until[row, n:end] = min(params.min_tokens, _MAX_INT)
    return TokenBiases(tokens, values, until)


def check_biases(num_biases: int, num_end_tokens: int) -> None:
    """ValueError if a request with `min_tokens` or `logit_bias` has more than a row holds."""
    if num_biases + num_end_tokens > MAX_BIASES:
        raise ValueError(
            f"{num_biases} tokens in logit_bias and {num_end_tokens} end tokens (EOS and "
            f"stop_token_ids together) that min_tokens leaves out are more than {MAX_BIASES}"
        )


def token_masks(
    seqs: Seq[Sequence], num_rows: int, vocab_size: int
) -> tuple[np.ndarray, dict[int, str]]:
    """Masks `u32[num_rows, ceil(V / 32)]` of the tokens that the sequences' constraints allow.

    Also returns why a constraint has raised, by the sequence's id; its mask means nothing.
    """
    masks = np.full((num_rows, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    masks[:, -1] >>= -vocab_size % 32
    errors: dict[int, str] = {}
    for seq, mask in zip(seqs, masks, strict=False):
        if seq.constraint is not None:
            try:
                seq.constraint.restrict(seq.output_token_ids, mask)
            except Exception as error:
                errors[seq.seq_id] = f"its constraint raised {error_text(error)}"
    return masks, errors
