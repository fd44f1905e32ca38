"""The steps of a batch in flight: the device has been given them and has not answered yet."""

import time
import types
from collections.abc import Callable, Mapping

import jax
import numpy as np

from paged_jax.executor.buckets import padded
from paged_jax.executor.interface import StepResult
from paged_jax.outputs import TokenLogprobs
from paged_jax.scheduling.batch import PrefillChunk
from paged_jax.scheduling.request import Sequence
from paged_jax.steps.logits import ArrayLike
from paged_jax.steps.sampling import Sampled

# Tokens of a prompt that are scored at a time: their logits over the vocabulary are large.
SCORE_ROWS = 64

# (log-probabilities of the tokens f32[N], likeliest tokens i32[N, K], theirs f32[N, K])
Scores = tuple[ArrayLike, ArrayLike, ArrayLike]


def sampled_logprobs(seqs: list[Sequence], sampled: Sampled) -> list[TokenLogprobs | None]:
    """Log-probabilities of each row's token; fetched only where a sequence asks for them."""
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
    """For each chunk, the log-probabilities of the prompt's tokens that its request still lacks.

    A token is scored by the hidden state of the token before it.
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
    """The leading rows; `counts` says how many likeliest tokens each row keeps."""
    own, top_tokens, top = map(np.asarray, scores)
    return [
        TokenLogprobs(
            float(own[row]),
            tuple(zip(top_tokens[row, :count].tolist(), top[row, :count].tolist(), strict=True)),
        )
        for row, count in enumerate(counts)
    ]


def _failed_rows(
    seqs: list[Sequence], sampled: Sampled, errors: Mapping[int, str]
) -> dict[int, str]:
    """Why a row's token means nothing, by row.

    errors: by id, why a sequence had failed before it was sampled.
    """
    found = {}
    for row in np.flatnonzero(~np.asarray(sampled.is_valid)[: len(seqs)]).tolist():
        number = seqs[row].num_output_tokens
        found[row] = (
            "its constraint, min_tokens, logit_bias or logits_processors leave no token to be "
            f"output token {number}"
            if np.asarray(sampled.is_finite)[row]
            else f"the logits of its output token {number} are not finite"
        )
    if errors:
        known = ((row, errors.get(seq.seq_id)) for row, seq in enumerate(seqs))
        found |= {row: reason for row, reason in known if reason is not None}
    return found


class PendingSteps:
    """Steps in flight; the host is free until it asks for their `result`.

    The device works on one iteration after the other: if these steps were dispatched `after`
    another iteration, their time counts from when that iteration's tokens were back.
    """

    def __init__(
        self,
        steps: list[tuple[list[Sequence], Sampled]],  # sequences and the tokens sampled for them
        last: jax.Array | None,  # the array that is computed last, unless it is sampled
        score: Callable[[], list[list[TokenLogprobs]]],  # scores the prompts' own tokens
        *,
        start_s: float,  # when the first step was dispatched, by `time.perf_counter`
        swap_s: float = 0.0,  # seconds since then that went by swapping
        after: "PendingSteps | None" = None,
        errors: Mapping[int, str] = types.MappingProxyType({}),  # by id, why a sequence has failed
    ):
        self.steps = steps
        self._last = last
        self._score = score
        self._errors = errors
        self._start_s = start_s
        self._swap_s = swap_s
        self._after = after
        self._end_s = start_s
        for _, sampled in steps:
            for array in (sampled.tokens, sampled.is_valid):
                array.copy_to_host_async()

    def result(self) -> StepResult:
        """Wait for the tokens. Raises what the device's steps raised."""
        if self._last is not None:
            self._last.block_until_ready()
        scored = self._score()
        tokens: list[int] = []
        failed: dict[int, str] = {}
        logprobs: list[TokenLogprobs | None] = []
        for seqs, sampled in self.steps:
            reasons = _failed_rows(seqs, sampled, self._errors)
            failed |= {len(tokens) + row: reason for row, reason in reasons.items()}
            tokens += np.asarray(sampled.tokens)[: len(seqs)].tolist()
            logprobs += sampled_logprobs(seqs, sampled)
        self._end_s = time.perf_counter()
        start_s = self._start_s
        if self._after is not None:
            start_s = max(start_s, self._after._end_s)
            self._after = None  # it would keep its arrays alive
        device_s = self._end_s - start_s
        return StepResult(tokens, logprobs, device_s, scored, failed, self._swap_s)
