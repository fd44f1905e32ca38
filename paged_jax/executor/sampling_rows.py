"""Sampling parameters of a batch's rows as arrays."""

from collections.abc import Iterable

import numpy as np

from paged_jax.scheduling.request import Sequence
from paged_jax.steps.sampling import MAX_END_TOKENS, ArrayLike, SamplingBatch

# One row; names as in SamplingBatch, a flag of which is set if any row sets it.
ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("seed", np.uint32),
        ("num_prompt_tokens", np.int32),
        ("min_tokens", np.int32),
        ("end_tokens", np.int32, (MAX_END_TOKENS,)),
        ("adjusts", np.bool_),
        ("draws", np.bool_),
        ("filters", np.bool_),
        ("wants_logprobs", np.bool_),
    ]
)
_FLAGS = ("adjusts", "draws", "filters", "wants_logprobs")
_NO_END_TOKENS = (-1,) * MAX_END_TOKENS
# Limits of the device's types; beyond them a parameter's effect does not change.
_MAX_INT = int(np.iinfo(np.int32).max)
_MAX_FLOAT = float(np.finfo(np.float32).max)


def sampling_rows(seqs: Iterable[Sequence], num_rows: int) -> np.ndarray:
    """Rows of `seqs`, then greedy rows up to `num_rows`: an array of `ROW`."""
    rows = np.zeros(num_rows, ROW)
    rows["end_tokens"] = -1
    rows["top_p"] = rows["repetition_penalty"] = 1
    for i, seq in enumerate(seqs):
        rows[i] = sampling_row(seq)
    return rows


def sampling_row(seq: Sequence) -> tuple[object, ...]:
    """The fields of `ROW`, in their order."""
    params = seq.request.params
    end_tokens = _NO_END_TOKENS
    if params.min_tokens:
        ids = sorted(seq.end_token_ids)
        end_tokens = (*ids, *_NO_END_TOKENS[len(ids) :])
    draws = not params.is_greedy
    return (
        min(params.temperature, _MAX_FLOAT),
        min(params.top_k, _MAX_INT),
        params.top_p,
        params.min_p,
        min(params.repetition_penalty, _MAX_FLOAT),
        params.presence_penalty,
        params.frequency_penalty,
        seq.sampling_seed,
        seq.num_prompt_tokens,
        params.min_tokens,
        end_tokens,
        params.needs_history,
        draws,
        draws and bool(params.top_k or params.top_p < 1 or params.min_p),
        params.wants_candidates,
    )


def sampling_batch(rows: np.ndarray, history: ArrayLike) -> SamplingBatch:
    """The batch that the device takes; `history`: `i32[len(rows), H]`."""
    values = {name: rows[name] for name in ROW.names or () if name not in _FLAGS}
    flags = {name: np.asarray(rows[name].any()) for name in _FLAGS}
    return SamplingBatch(**values, **flags, history=history)


def check_end_tokens(num_end_tokens: int) -> None:
    """ValueError if a request with min_tokens has more end tokens than a row holds."""
    if num_end_tokens > MAX_END_TOKENS:
        raise ValueError(
            f"min_tokens with {num_end_tokens} end tokens (EOS and stop_token_ids together); "
            f"at most {MAX_END_TOKENS} are supported"
        )
