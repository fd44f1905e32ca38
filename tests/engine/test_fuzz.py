"""Random callers: everything that ends, ends with what it would have got alone."""

import random
from collections.abc import Iterator

import pytest

from paged_jax import Engine, RequestOutput, SamplingParams
from tests.conftest import assert_idle
from tests.engine.mixed_requests import essence, mixed_requests, serve


@pytest.fixture(scope="module")
def requests():
    return mixed_requests()


@pytest.fixture(scope="module")
def small_engine(engine_with):
    """Its pool is so small that it preempts."""
    return engine_with(block_size=4, num_blocks=96)


@pytest.fixture(scope="module")
def wanted(small_engine, requests):
    return serve(small_engine, requests)


class Callers:
    """Each method is one thing that a caller may do next."""

    def __init__(self, engine: Engine, requests, wanted, seed: int):
        self.engine, self.requests, self.wanted = engine, requests, wanted
        self.rng = random.Random(seed)
        self.waiting: dict[str, int] = {}  # name -> which of the requests
        self.streams: list[tuple[Iterator[RequestOutput], int]] = []
        self.num_done = 0

    def check(self, output: RequestOutput, i: int) -> None:
        if output.finished:
            assert essence(output) == self.wanted[i]
            self.num_done += 1

    def pick(self) -> int:
        return self.rng.randrange(len(self.requests))

    def add(self):
        name, i = f"{self.rng.random()}", self.pick()
        self.engine.add_request(name, *self.requests[i], stream=self.rng.random() < 0.3)
        self.waiting[name] = i

    def step(self):
        for output in self.engine.step():
            self.check(output, self.waiting[output.request_id])
            if output.finished:
                del self.waiting[output.request_id]

    def open_stream(self):
        i = self.pick()
        self.streams.append((self.engine.stream(*self.requests[i]), i))

    def read_stream(self):
        if self.streams:
            stream, i = self.streams.pop(self.rng.randrange(len(self.streams)))
            output = next(stream)
            self.check(output, i)
            if not output.finished:
                self.streams.append((stream, i))

    def close_stream(self):
        if self.streams:
            self.streams.pop()[0].close()

    def abort(self):
        if self.waiting:
            name = self.rng.choice(list(self.waiting))
            output = self.engine.abort(name)
            if output is not None:  # otherwise it has ended, and step will return it
                for out, whole in zip(
                    output.outputs, self.wanted[self.waiting.pop(name)], strict=True
                ):
                    assert out.token_ids == whole[1][: len(out.token_ids)]

    def generate(self):
        i = self.pick()
        [output] = self.engine.generate(*self.requests[i], progress=False)
        self.check(output, i)

    def generate_with_a_bad_prompt(self):
        with pytest.raises(ValueError, match="999"):
            self.engine.generate([[65], [999]], SamplingParams(), progress=False)

    def finish(self):
        for stream, i in self.streams:
            *_, last = stream
            self.check(last, i)
        while self.engine.has_work:
            self.step()
        assert not self.waiting


ACTIONS = {
    Callers.step: 40,
    Callers.add: 20,
    Callers.read_stream: 20,
    Callers.open_stream: 6,
    Callers.abort: 5,
    Callers.close_stream: 3,
    Callers.generate: 2,
    Callers.generate_with_a_bad_prompt: 2,
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_callers_do_not_disturb_each_other(small_engine, requests, wanted, seed):
    callers = Callers(small_engine, requests, wanted, seed)
    before = small_engine.core.scheduler.counters.num_preemptions
    for action in callers.rng.choices(list(ACTIONS), list(ACTIONS.values()), k=200):
        action(callers)
    callers.finish()
    assert_idle(small_engine)
    assert callers.num_done > 20
    assert small_engine.core.scheduler.counters.num_preemptions > before
