"""Log-probabilities from the device to the sequences and prompts that ask for them."""

from collections.abc import Callable

import numpy as np

from paged_jax.executor.buckets import padded
from paged_jax.sampling import ArrayLike, Sampled
from paged_jax.scheduling.batch import PrefillChunk
from paged_jax.scheduling.logprobs import TokenLogprobs
from paged_jax.scheduling.request import Sequence

# A prompt's tokens are scored so many at a time: their logits over the vocabulary are large.
SCORE_ROWS = 64

# (log-probabilities of the tokens f32[N], likeliest tokens i32[N, K], theirs f32[N, K])
Scores = tuple[ArrayLike, ArrayLike, ArrayLike]


def sampled_logprobs(seqs: list[Sequence], sampled: Sampled) -> list[TokenLogprobs | None]:
    """Of each row's sampled token; fetched only where a sequence asks for them."""
    counts = [_num_logprobs(seq) for seq in seqs]
    if all(count is None for count in counts):
        return [None] * len(seqs)
    rows = _to_host(
        (sampled.logprobs, sampled.top_tokens, sampled.top_logprobs), [n or 0 for n in counts]
    )
    return [None if n is None else row for n, row in zip(counts, rows, strict=True)]


def _num_logprobs(seq: Sequence) -> int | None:
    """How many tokens' log-probabilities the sequence needs beside the sampled one's."""
    search, params = seq.request.beam_search, seq.request.params
    if search is not None:
        return search.num_candidates
    return 0 if params.logprobs is None and params.wants_candidates else params.logprobs


def prompt_logprobs(
    chunks: list[PrefillChunk],
    hidden: ArrayLike,  # [N, E], of the chunks' tokens, packed
    score: Callable[[np.ndarray, np.ndarray], Scores],  # hidden [SCORE_ROWS, E], next tokens
) -> list[list[TokenLogprobs]]:
    """For each chunk what its request lacks of its prompt, as far as the chunk reaches.

    A token is scored by the hidden state of the one before it.
    """
    states = np.asarray(hidden)
    found, at = [], 0  # the chunk's first packed token
    for chunk in chunks:
        seq, request = chunk.seq, chunk.seq.request
        end = min(chunk.start + chunk.num_tokens, seq.num_prompt_tokens - 1)
        begin = max(chunk.start, len(request.prompt_logprobs))
        scored: list[TokenLogprobs] = []
        if request.lacks_prompt_logprobs:
            for first in range(begin, end, SCORE_ROWS):
                last = min(first + SCORE_ROWS, end)
                rows = np.zeros((SCORE_ROWS, states.shape[1]), states.dtype)
                rows[: last - first] = states[at + first - chunk.start : at + last - chunk.start]
                tokens = padded(seq.token_ids[first + 1 : last + 1], SCORE_ROWS)
                count = request.params.prompt_logprobs or 0
                scored += _to_host(score(rows, tokens), [count] * (last - first))
        found.append(scored)
        at += chunk.num_tokens
    return found


def _to_host(scores: Scores, counts: list[int]) -> list[TokenLogprobs]:
    """Of the leading rows, each with so many of its likeliest tokens."""
    own, top_tokens, top = map(np.asarray, scores)
    return [
        TokenLogprobs(
            float(own[row]),
            tuple(zip(top_tokens[row, :count].tolist(), top[row, :count].tolist(), strict=True)),
        )
        for row, count in enumerate(counts)
    ]
