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
    """Whether it is one prompt rather than a list of them."""
    if isinstance(prompts, str | Mapping) or is_chat(prompts):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and _is_int(prompts[0])


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
                f"got {sorted(prompt)}"
            )
        prompt = prompt[known.pop()]
    if isinstance(prompt, str):
        return prompt, _checked(tokenizer.encode(prompt), vocab_size)
    if is_chat(prompt):
        if not tokenizer.chat_template:
            raise ValueError("this model has no chat template; give the prompt as text")
        text = str(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        )
        return text, _checked(tokenizer.encode(text, add_special_tokens=False), vocab_size)
    if isinstance(prompt, Sequence) and all(_is_int(token) for token in prompt):
        return None, _checked([operator.index(token) for token in prompt], vocab_size)  # type: ignore[arg-type]
    raise ValueError(
        f"a prompt is text, a list of token ids, or a list of chat messages; got {prompt!r:.80}"
    )


def _checked(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if not token_ids:
        raise ValueError("the prompt is empty")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
    return tuple(token_ids)
