"""ShareGPT conversations turn by turn, as the tokens that a chat model is given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from paged_jax.loading.transformers_tokenizer import Tokenizer
from paged_jax.workloads.json_list import JsonListReader
from paged_jax.workloads.sharegpt import OTHER_ROLES, PROMPT_ROLES, Exchange, read_turns

_MARK = "ANSWER"  # stands for a reply while a template is looked at


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, with the template's tokens around it, and how long the answer is."""

    token_ids: list[int]  # from the end of the answer before to the beginning of this one
    num_reply_tokens: int


def read_conversations(path: str | Path) -> list[list[Exchange]]:
    """Every record's prompts, each with its answer; records without any are left out."""
    reader = JsonListReader(path)
    conversations = []
    for record in reader:
        try:
            turns = read_turns(record)
        except ValueError as error:
            raise reader.error(str(error)) from None
        spoken = [(role, text) for role, text in turns if text.strip()]
        exchanges = [
            Exchange(prompt, reply)
            for (role, prompt), (next_role, reply) in pairwise(spoken)
            if role in PROMPT_ROLES and next_role not in PROMPT_ROLES | OTHER_ROLES
        ]
        if exchanges:
            conversations.append(exchanges)
    if not conversations:
        raise ValueError(f"{path}: no conversation with a prompt and its answer")
    return conversations


def draw_conversations(
    conversations: Sequence[Sequence[Exchange]],
    tokenizer: Tokenizer,
    count: int,
    *,
    min_turns: int,
    max_turns: int,
    max_reply_tokens: int,
    seed: int,
) -> list[list[Turn]]:
    """`count` conversations of at least `min_turns`, cut after `max_turns`, in random order."""
    chosen = [exchanges for exchanges in conversations if len(exchanges) >= min_turns]
    if len(chosen) < count:
        raise ValueError(
            f"only {len(chosen)} conversations have {min_turns} turns or more, {count} are needed"
        )
    order = np.random.default_rng(seed).permutation(len(chosen))[:count]
    around = turn_format(tokenizer)

    def encode(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return token_ids

    return [
        [
            Turn(
                encode(around(exchange.prompt, is_first=number == 0)),
                max(1, min(len(encode(exchange.reply)), max_reply_tokens)),
            )
            for number, exchange in enumerate(chosen[index][:max_turns])
        ]
        for index in order
    ]


def turn_format(tokenizer: Tokenizer) -> Callable[..., str]:
    """A function of (prompt, is_first) to the text from one answer's end to the next one's start.

    What comes between is the model's chat template's, or plain names where it has none. A
    conversation is then these texts and the answers as they were generated, in turns.
    """
    if not tokenizer.chat_template:
        return lambda prompt, *, is_first: f"{'' if is_first else '\n\n'}User: {prompt}\n\nModel:"

    def render(messages: list[dict[str, str]]) -> str:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )

    def around(prompt: str, *, is_first: bool) -> str:
        asked = {"role": "user", "content": prompt}
        if is_first:
            return render([asked])
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        return render([*before, asked]).split(_MARK, 1)[1]

    return around
