"""Outputs: what the engine gives back for a request."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
CUT_SHORT: tuple[FinishReason, ...] = ("abort", "timeout", "error")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one token, sampled or given, of the raw logits."""

    sampled: float  # of the token itself
    top: tuple[tuple[int, float], ...]  # (token, log-probability), most likely first


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of the prompt, complete or so far.

    `text` ends before a stop string or stop token, unless `include_stop_str_in_output`;
    `token_ids` holds all generated tokens. `stop_reason` is the stop token or string that ended
    it, None for EOS. In a beam search `score` is `cumulative_logprob` divided by the length to the
    power of the length penalty.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None  # None while it runs
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None  # one for each token, where asked for
    cumulative_logprob: float | None = None  # of all tokens; None where nothing needs it
    score: float | None = None  # by which beams are ordered


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on the engine's clock."""

    arrival_s: float
    first_scheduled_s: float | None
    token_times_s: list[list[float]]  # by sequence; one list for all beams of a search
    num_preemptions: int

    @property
    def first_token_s(self) -> float | None:
        return min((times[0] for times in self.token_times_s if times), default=None)

    @property
    def last_token_s(self) -> float | None:
        return max((times[-1] for times in self.token_times_s if times), default=None)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's continuations: `n` of them, best first where they were ranked.

    `num_cached_tokens` of the prompt were in the prefix cache when the request was admitted.
    `prompt_logprobs`, where asked for, has an entry for each token of the prompt: None for the
    first, then its log-probability after the tokens before it. `error` says why a request has
    failed; `outputs` has what it generated until then. `finish_reason` is "abort", "timeout" or
    "error" if any of its continuations was cut short so, otherwise the reason of the first.
    """

    request_id: str
    prompt: str | None  # None if it came as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(repr=False)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    finish_reason: FinishReason | None = None  # None while it runs


def error_text(error: BaseException) -> str:
    """An exception in one line, as `RequestOutput.error` has it."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
