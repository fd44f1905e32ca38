"""Prompts as callers write them, turned into token ids; checks of a request's arguments."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from numbers import Integral, Number
from typing import Any

from paged_jax.engine.chat import ChatPrompt, Message, is_chat, render, shown
from paged_jax.loading.tokenizer import Tokenizer
from paged_jax.models.config import ModelConfig
from paged_jax.sampling_params import SamplingParams
from paged_jax.steps.logits import MAX_BIASES
from paged_jax.steps.model_steps import NUM_LOGPROBS
from paged_jax.values import check_unicode, flag, integer, is_number, items, string

# Text, token ids (a list, a 1-D array or another iterable of integers), {"prompt": text},
# {"prompt_token_ids": ids}, or a chat: its messages, or a `ChatPrompt`.
Prompt = str | Iterable[int] | Mapping[str, Any] | Iterable[Message] | ChatPrompt


def prompt_list(prompts: Any) -> list[Any]:
    """The prompts that a caller gives: one alone, valid or not, or any iterable of prompts.

    Numbers alone are one prompt of ids, in whatever iterable; a set has no order and is none. The
    rows of a 2-D array are prompts as they stand: padding is not taken away.
    """
    many = items(prompts)
    if many is None:
        return [prompts]
    if isinstance(prompts, Set):
        return many
    # An empty array of numbers is an empty prompt, an empty list no prompt.
    kind = getattr(getattr(prompts, "dtype", None), "kind", "O")
    is_empty = not many and kind in "biufc" and prompts.ndim == 1
    is_one = is_empty or is_chat(many) or (bool(many) and isinstance(many[0], Number))
    return [many] if is_one else many


def encode(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int
) -> tuple[str | None, tuple[int, ...]]:
    """(text or None, token ids). ValueError for an empty prompt or an unknown token."""
    given: Any = prompt
    if isinstance(given, Mapping):
        if "messages" in given:
            return _encode_chat(given, tokenizer, vocab_size)
        given = _of_dict(given)
    if isinstance(given, str):
        text = str.__str__(given)  # of a subclass, such as numpy's, too
        return text, _checked(_tokenize(text, tokenizer), vocab_size)
    found = None if isinstance(given, Set) else items(given)
    if is_chat(found):
        return _encode_chat({"messages": found}, tokenizer, vocab_size)
    if found is None or not all(type(item) is int or is_number(item, Integral) for item in found):
        raise ValueError(
            "a prompt is text, a list of token ids (or a 1-D array of integers), or a list of chat "
            f"messages; got {shown(given)}"
        )
    return None, _checked(list(map(int, found)), vocab_size)


def _of_dict(prompt: Mapping[str, Any]) -> Any:
    if prompt.keys() not in ({"prompt"}, {"prompt_token_ids"}):
        raise ValueError(
            "a prompt given as a dict is a chat with 'messages', or has one key, 'prompt' or "
            f"'prompt_token_ids'; got {sorted(map(str, prompt))}"
        )
    [(key, given)] = prompt.items()
    if key == "prompt_token_ids" and isinstance(given, str):
        raise ValueError(f"prompt_token_ids must be a list of token ids, got {shown(given)}")
    return given


def _encode_chat(
    chat: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int
) -> tuple[str, tuple[int, ...]]:
    messages = items(chat["messages"])
    if messages is None or not is_chat(messages):
        given = chat["messages"] if messages is None else messages
        raise ValueError(f"a chat is a list of messages with role and content; got {shown(given)}")
    text = render(chat, messages, tokenizer)
    return text, _checked(_tokenize(text, tokenizer, add_special_tokens=False), vocab_size)


def truncate(
    token_ids: tuple[int, ...], params: SamplingParams, max_model_len: int
) -> tuple[int, ...]:
    """The last tokens, as many as `truncate_prompt_tokens` keeps; ValueError if there are none."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        name = "min_tokens" if params.max_tokens is None else "max_tokens"
        num_tokens = getattr(params, name)
        keep = max_model_len - max(num_tokens, 1)
        if keep < 1:
            raise ValueError(
                f"truncate_prompt_tokens -1: {name} {num_tokens} leaves no room for a prompt "
                f"within max_model_len {max_model_len}; lower {name}"
            )
    return token_ids[-keep:]


def _tokenize(text: str, tokenizer: Tokenizer, **options: bool) -> list[int]:
    check_unicode("the prompt", text)
    token_ids: list[int] = tokenizer.encode(text, **options)
    return token_ids


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
    num_biases = len(params.logit_biases)
    if params.min_tokens and num_biases + num_end_tokens > MAX_BIASES:
        raise ValueError(
            f"{num_biases} tokens in logit_bias and {num_end_tokens} end tokens (EOS and "
            f"stop_token_ids together) that min_tokens leaves out are more than {MAX_BIASES}"
        )
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
    if request_id is not None:
        string("request_id", request_id)
    if arrival_time is not None and not (is_number(arrival_time) and math.isfinite(arrival_time)):
        raise ValueError(f"arrival_time must be a finite number of seconds, got {arrival_time!r}")
    integer("priority", priority)
    if timeout_s is not None and not (is_number(timeout_s) and timeout_s > 0):
        raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")
    flag("stream", stream)
    if on_output is not None and not callable(on_output):
        raise ValueError(f"on_output must be callable, got {on_output!r}")
