"""Prompts as callers write them, turned into token ids; checks of a request's arguments."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from paged_jax.executor.sampling_rows import check_biases
from paged_jax.loading.tokenizer import Tokenizer
from paged_jax.models.config import ModelConfig
from paged_jax.sampling_params import SamplingParams
from paged_jax.steps.model_steps import NUM_LOGPROBS

# Text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a chat: a list of messages with
# role and content.
Prompt = str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]


def is_chat(prompt: Any) -> bool:
    """Whether it is a list of messages with roles."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def is_single_prompt(prompts: Any) -> bool:
    """Whether it is one prompt, valid or not, rather than a list of prompts."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence) or is_chat(prompts):
        return True
    return bool(prompts) and _is_int(prompts[0])


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def encode(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int
) -> tuple[str | None, tuple[int, ...]]:
    """(text or None, token ids). ValueError for an empty prompt or an unknown token."""
    if isinstance(prompt, Mapping):
        known = {"prompt", "prompt_token_ids"} & prompt.keys()
        if len(known) != 1 or len(prompt) != 1:
            raise ValueError(
                "a prompt given as a dict has one key, 'prompt' or 'prompt_token_ids'; "
                f"got {sorted(map(str, prompt))}"
            )
        prompt = prompt[known.pop()]
    if isinstance(prompt, str):
        return prompt, _checked(_tokenize(prompt, tokenizer), vocab_size)
    if is_chat(prompt):
        if not tokenizer.chat_template:
            raise ValueError("this model has no chat template; give the prompt as text")
        text = _render_chat(prompt, tokenizer)
        return text, _checked(_tokenize(text, tokenizer, add_special_tokens=False), vocab_size)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if is_list and all(_is_int(token) for token in prompt):
        return None, _checked([operator.index(token) for token in prompt], vocab_size)  # type: ignore[arg-type]
    raise ValueError(
        f"a prompt is text, a list of token ids, or a list of chat messages; got {prompt!r:.80}"
    )


def truncate(
    token_ids: tuple[int, ...], params: SamplingParams, max_model_len: int
) -> tuple[int, ...]:
    """The last tokens, as many as `truncate_prompt_tokens` keeps; ValueError if there are none."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max_model_len - (params.max_tokens or 1)
        if keep < 1:
            raise ValueError(
                f"truncate_prompt_tokens -1: max_tokens {params.max_tokens} leaves no room for a "
                f"prompt within max_model_len {max_model_len}"
            )
    return token_ids[-keep:]


def _tokenize(text: str, tokenizer: Tokenizer, **options: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the prompt is not valid Unicode: {error.reason} (at {error.start})"
        ) from None
    token_ids: list[int] = tokenizer.encode(text, **options)
    return token_ids


def _render_chat(messages: Any, tokenizer: Tokenizer) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
    except Exception as error:  # a template is a program, and may fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the model's chat template fails on these messages: {reason}") from error


def _checked(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if not token_ids:
        raise ValueError("the prompt is empty")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
    return tuple(token_ids)


# Checks of a request's arguments


def check_request(params: SamplingParams, config: ModelConfig, *, stream: bool) -> None:
    """ValueError, with the value, for parameters that no step can serve."""
    named = {
        "stop token": params.stop_token_ids,
        "allowed token": params.allowed_token_ids or (),
        "logit_bias of token": [token for token, _ in params.logit_biases],
    }
    for name, tokens in named.items():
        if outside := [token for token in tokens if token >= config.vocab_size]:
            raise ValueError(
                f"{name} {outside[0]} is outside the vocabulary of {config.vocab_size}"
            )
    if stream and (params.beam_width or params.num_sequences > params.n):
        raise ValueError(
            "beam_width and best_of do not stream: which sequences are best is known at the end"
        )
    eos = () if params.ignore_eos else config.eos_token_ids
    num_end_tokens = len({*params.stop_token_ids, *eos})
    check_biases(len(params.logit_biases), num_end_tokens if params.min_tokens else 0)
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
