"""Refusal of what does not go with the model, or with a step's static shapes."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from paged_jax.decode import NUM_LOGPROBS
from paged_jax.executor.sampling_rows import check_end_tokens
from paged_jax.models.config import ModelConfig
from paged_jax.scheduling.sampling_params import SamplingParams


def check_request(params: SamplingParams, config: ModelConfig, *, stream: bool) -> None:
    """ValueError, with the value, for what no step can do."""
    if outside := [t for t in params.stop_token_ids if t >= config.vocab_size]:
        raise ValueError(
            f"stop token {outside[0]} is outside the vocabulary of {config.vocab_size}"
        )
    if stream and (params.beam_width or params.num_sequences > params.n):
        raise ValueError(
            "beam_width and best_of do not stream: which sequences are best is known at the end"
        )
    eos = () if params.ignore_eos else config.eos_token_ids
    num_end_tokens = len({*params.stop_token_ids, *eos})
    if params.min_tokens:
        check_end_tokens(num_end_tokens)
    if params.beam_width and params.beam_width + num_end_tokens > NUM_LOGPROBS:
        raise ValueError(
            f"beam_width {params.beam_width} and {num_end_tokens} end tokens (EOS and "
            f"stop_token_ids together) are more than the {NUM_LOGPROBS} candidates of a step"
        )


def check_call(
    request_id: str | None,
    *,
    arrival_time: float | None,
    priority: int,
    timeout_s: float | None,
    stream: bool,
    on_output: Callable[..., Any] | None,
) -> None:
    """ValueError, with the value, for arguments of `Engine.add_request` that mean nothing."""
    if request_id is not None and not isinstance(request_id, str):
        raise ValueError(f"request_id must be a string, got {request_id!r}")
    if arrival_time is not None and not (_is_number(arrival_time) and math.isfinite(arrival_time)):
        raise ValueError(f"arrival_time must be a finite number of seconds, got {arrival_time!r}")
    if not _is_number(priority, Integral):
        raise ValueError(f"priority must be an integer, got {priority!r}")
    if timeout_s is not None and not (_is_number(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")
    if not isinstance(stream, bool):
        raise ValueError(f"stream must be True or False, got {stream!r}")
    if on_output is not None and not callable(on_output):
        raise ValueError(f"on_output must be callable, got {on_output!r}")


def _is_number(value: Any, kind: type = Real) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
