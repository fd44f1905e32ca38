"""Users who chat with an engine: each asks again as soon as the last question is answered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from paged_jax.engine.engine import Engine
from paged_jax.loading.tokenizer import Tokenizer
from paged_jax.sampling_params import SamplingParams
from paged_jax.workloads import Exchange

_MARK = "ANSWER"  # stands for a reply while a template is looked at


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, with the template's tokens around it, and how long the answer is."""

    token_ids: list[int]  # from the end of the answer before to the beginning of this one
    num_reply_tokens: int


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
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
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

    def around(prompt: str, *, is_first: bool) -> str:
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        messages = [*([] if is_first else before), {"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return str(text) if is_first else str(text).split(_MARK, 1)[1]

    return around


@dataclass(frozen=True, slots=True)
class Window:
    """How much of a conversation a prompt holds: its end, of at most `max_tokens`.

    The beginning moves on in multiples of `step` tokens. With 1, prompts are as long as they can
    be, and once a conversation is longer no two of them begin alike.
    """

    max_tokens: int
    step: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.step <= self.max_tokens:
            raise ValueError(f"the window's step must be between 1 and {self.max_tokens}, {self=}")

    def start(self, num_tokens: int) -> int:
        """Where the prompt begins in a conversation of `num_tokens`."""
        surplus = max(0, num_tokens - self.max_tokens)
        return -(-surplus // self.step) * self.step


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A question, answered. Times in seconds."""

    conversation: int
    turn: int  # from 0
    num_prompt_tokens: int
    is_cut: bool  # whether the window left out the beginning of the conversation
    num_cached_tokens: int
    num_output_tokens: int
    first_token_s: float  # from the question
    last_token_s: float


@dataclass(frozen=True, slots=True)
class ChatRun:
    """Conversations, held."""

    turns: list[AnsweredTurn]  # as they ended
    histories: list[list[int]]  # all tokens of each conversation, whatever was left out of prompts
    wall_s: float
    evictions: int  # of blocks, from the prefix cache


def chat(
    engine: Engine,
    conversations: Sequence[Sequence[Turn]],
    *,
    num_users: int,
    window: Window,
    salt: str | None = None,
    on_turn: Callable[[AnsweredTurn], object] = lambda _: None,
) -> ChatRun:
    """Hold the conversations, at most `num_users` of them at a time.

    The history holds the model's own answers, greedy and each as long as the turn says.
    """
    histories: list[list[int]] = [[] for _ in conversations]
    asked: dict[str, tuple[int, int, int]] = {}  # request -> conversation, turn, prompt's start
    answered: list[AnsweredTurn] = []
    upcoming = iter(range(len(conversations)))

    def ask(conversation: int, turn: int) -> None:
        history, what = histories[conversation], conversations[conversation][turn]
        history += what.token_ids
        start = window.start(len(history))
        params = SamplingParams(
            temperature=0, max_tokens=what.num_reply_tokens, ignore_eos=True, cache_salt=salt
        )
        request_id = engine.add_request(None, history[start:], params)
        asked[request_id] = conversation, turn, start

    clock, evictions = engine.core.clock, engine.sharing_stats.evictions
    begin = clock()
    for _, conversation in zip(range(num_users), upcoming, strict=False):
        ask(conversation, 0)
    while asked:
        for output in engine.step():
            conversation, turn, start = asked.pop(output.request_id)
            [completion], metrics = output.outputs, output.metrics
            histories[conversation] += completion.token_ids
            assert metrics.first_token_s is not None
            assert metrics.last_token_s is not None
            answered.append(
                AnsweredTurn(
                    conversation,
                    turn,
                    len(output.prompt_token_ids),
                    start > 0,
                    output.num_cached_tokens,
                    len(completion.token_ids),
                    metrics.first_token_s - metrics.arrival_s,
                    metrics.last_token_s - metrics.arrival_s,
                )
            )
            on_turn(answered[-1])
            if turn + 1 < len(conversations[conversation]):
                ask(conversation, turn + 1)
            elif (following := next(upcoming, None)) is not None:
                ask(following, 0)
    wall_s = clock() - begin
    return ChatRun(answered, histories, wall_s, engine.sharing_stats.evictions - evictions)
