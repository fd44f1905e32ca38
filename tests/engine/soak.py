"""Random callers of an engine under pressure: what they ask, when they give up, what they get."""

import random
from dataclasses import dataclass

from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.scheduling.checks import QueueFull
from tests.engine.mixed_requests import TEXT

LETTERS = TEXT.encode()
KINDS = (
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.9, "top_k": 20},
    {"temperature": 1.2, "n": 2},
    {"temperature": 0.8, "n": 3, "ignore_eos": True},
    {"temperature": 0.8, "n": 1, "best_of": 2},
    {"beam_width": 2},
    {"beam_width": 3, "ignore_eos": True},
    {"temperature": 0, "stop": ["the ", "\n"]},
    {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 3},
    {"temperature": 0, "logprobs": 1, "prompt_logprobs": 0},
)


@dataclass
class Caller:
    """A request, and until when its caller waits for it."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    timeout_s: float | None
    aborts_after: int | None  # steps
    streams: bool
    calls_back: bool

    @classmethod
    def random(cls, rng: random.Random) -> "Caller":
        start = rng.choice((0, 0, 200, 200, rng.randrange(5000)))  # some begin alike
        return cls(
            prompt=list(LETTERS[start : start + rng.randint(1, 80)]),
            params=SamplingParams(
                max_tokens=rng.randint(3, 45), seed=rng.randrange(1000), **rng.choice(KINDS)
            ),
            priority=rng.randint(-3, 3),
            timeout_s=rng.randint(1, 80) if rng.random() < 0.15 else None,
            aborts_after=rng.randint(1, 60) if rng.random() < 0.15 else None,
            streams=rng.random() < 0.3,
            calls_back=rng.random() < 0.3,
        )

    @property
    def can_stream(self) -> bool:
        return not self.params.beam_width and self.params.num_sequences == self.params.n


class Soak:
    """Callers come as the queue has room; a step of the engine is a second."""

    def __init__(self, engine: Engine, seed: int):
        self.engine = engine
        self.rng = random.Random(seed)
        self.now = 0.0
        self.callers: dict[str, Caller] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.aborts: dict[str, int] = {}  # request -> step
        self.num_steps = self.num_refused = 0
        self.num_streamed: dict[str, int] = {}  # tokens seen of a stream

    def run(self, num_requests: int) -> None:
        """Until so many requests have been taken and all have ended."""
        memory = self.engine.core.scheduler.memory
        while len(self.callers) < num_requests or self.engine.has_work:
            while len(self.callers) < num_requests and self.rng.random() < 0.35:
                if not self._add():
                    break
            self._abort()
            for output in self.engine.step():
                self.take(output)
            memory.check_invariants()
            self.num_steps += 1
            self.now += 1.0

    def _add(self) -> bool:
        caller = Caller.random(self.rng)
        name = f"{len(self.callers)}"
        try:
            self.engine.add_request(
                name,
                caller.prompt,
                caller.params,
                priority=caller.priority,
                timeout_s=caller.timeout_s,
                stream=caller.streams and caller.can_stream,
                on_output=self.take if caller.calls_back else None,
            )
        except QueueFull:
            self.num_refused += 1
            return False
        self.callers[name] = caller
        if caller.aborts_after is not None:
            self.aborts[name] = self.num_steps + caller.aborts_after
        return True

    def _abort(self) -> None:
        due = [name for name, step in self.aborts.items() if step <= self.num_steps]
        for name in due:
            del self.aborts[name]
            output = self.engine.abort(name)
            if output is not None:  # otherwise it has ended
                self.take(output)

    def take(self, output: RequestOutput) -> None:
        """An output of any request, from wherever it comes."""
        name = output.request_id
        assert name not in self.outputs, "nothing comes after the last output"
        num_tokens = sum(len(out.token_ids) for out in output.outputs)
        assert num_tokens >= self.num_streamed.get(name, 0)
        self.num_streamed[name] = num_tokens
        if output.finished:
            self.outputs[name] = output
