"""Prompts as callers write them, turned into token ids."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.loading.transformers_tokenizer import Tokenizer

# Text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a chat: messages with role and
# content.
Prompt = str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]


def is_chat(prompt: Any) -> bool:
    """Whether it is a list of messages."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def is_single_prompt(prompts: Any) -> bool:
    """Whether it is one prompt, good or bad, rather than a list of them."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence) or is_chat(prompts):
        return True
    return bool(prompts) and _is_int(prompts[0])


def _is_int(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def encode(
    prompt: Prompt, tokenizer: Tokenizer, vocab_size: int
) -> tuple[str | None, tuple[int, ...]]:
    """(the text, or None; its token ids). ValueError for an empty prompt or an unknown token."""
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
