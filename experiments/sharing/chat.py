"""Users who chat with an engine: each asks again as soon as the last question is answered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.sharing.conversations import Turn
from paged_jax.engine import Engine
from paged_jax.scheduling.sampling_params import SamplingParams


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

    clock = engine.core.clock
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
    return ChatRun(answered, histories, clock() - begin)
