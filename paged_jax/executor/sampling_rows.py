"""Sampling parameters of a batch's rows as arrays."""

from collections.abc import Sequence as Seq

import numpy as np

from paged_jax.sampling import MAX_END_TOKENS, ArrayLike, SamplingBatch
from paged_jax.scheduling.request import Sequence


def check_end_tokens(num_end_tokens: int) -> None:
    """ValueError if a request with min_tokens has more end tokens than a row holds."""
    if num_end_tokens > MAX_END_TOKENS:
        raise ValueError(
            f"min_tokens with {num_end_tokens} end tokens (EOS and stop_token_ids together); "
            f"at most {MAX_END_TOKENS} are supported"
        )


def sampling_batch(seqs: Seq[Sequence], num_rows: int, history: ArrayLike) -> SamplingBatch:
    """Parameters of ``seqs`` in the first of ``num_rows`` rows; padded rows are greedy.

    ``history`` ``i32[num_rows, H]`` holds the tokens of rows that `needs_history`.
    """
    all_params = [seq.request.params for seq in seqs]

    def column(values: list[float] | list[int], dtype: type, fill: float) -> np.ndarray:
        out: np.ndarray = np.full(num_rows, fill, dtype)
        out[: len(values)] = values
        return out

    end_tokens = np.full((num_rows, MAX_END_TOKENS), -1, np.int32)
    for row, seq in enumerate(seqs):
        if seq.request.params.min_tokens:
            end_tokens[row, : len(seq.end_token_ids)] = sorted(seq.end_token_ids)
    return SamplingBatch(
        temperature=column([p.temperature for p in all_params], np.float32, 0),
        top_k=column([p.top_k for p in all_params], np.int32, 0),
        top_p=column([p.top_p for p in all_params], np.float32, 1),
        min_p=column([p.min_p for p in all_params], np.float32, 0),
        repetition_penalty=column([p.repetition_penalty for p in all_params], np.float32, 1),
        presence_penalty=column([p.presence_penalty for p in all_params], np.float32, 0),
        frequency_penalty=column([p.frequency_penalty for p in all_params], np.float32, 0),
        seed=column([seq.sampling_seed for seq in seqs], np.uint32, 0),
        num_prompt_tokens=column([seq.num_prompt_tokens for seq in seqs], np.int32, 0),
        min_tokens=column([p.min_tokens for p in all_params], np.int32, 0),
        end_tokens=end_tokens,
        history=history,
        adjusts=np.asarray(any(map(needs_history, seqs))),
        draws=np.asarray(any(not p.is_greedy for p in all_params)),
        filters=np.asarray(
            any(not p.is_greedy and (p.top_k or p.top_p < 1 or p.min_p) for p in all_params)
        ),
        wants_logprobs=np.asarray(any(p.logprobs is not None for p in all_params)),
    )


def needs_history(seq: Sequence) -> bool:
    """Whether its logits are adjusted by the tokens so far, or by how many there are."""
    params = seq.request.params
    return params.has_penalties or params.min_tokens > 0
