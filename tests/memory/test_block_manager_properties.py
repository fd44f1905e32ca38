"""Block manager under random sequences, forks, pins and evictions: every slot holds its own."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.memory.memory_model import PROMPT, Model

index = st.integers(0, 7)
num_tokens = st.integers(0, len(PROMPT) - 1)


class ManagerMachine(RuleBasedStateMachine):
    """Small pools, prompts that begin alike, and anything in any order."""

    @initialize(
        num_blocks=st.integers(1, 20),
        block_size=st.sampled_from([1, 2, 4, 16]),
        caching=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool):
        self.model = Model(num_blocks, block_size, caching=caching)

    @rule(
        num_tokens=num_tokens,
        variant=st.integers(0, 40),
        salt=st.sampled_from([0, 0, 0, 1]),
        use_cache=st.sampled_from([True, True, True, False]),
    )
    def add_and_admit(self, num_tokens, variant, salt, use_cache):
        self.model.add(num_tokens, variant, salt, use_cache)
        self.model.admit(len(self.model.waiting) - 1)

    @precondition(lambda self: self.model.waiting)
    @rule(index=index, keep=st.integers(0, 2))
    def admit(self, index, keep):
        self.model.admit(index, keep)

    @precondition(lambda self: self.model.running)
    @rule(index=index, num_tokens=num_tokens)
    def plan_one(self, index, num_tokens):
        self.model.prefill(index, num_tokens)
        self.model.decode(index)

    @precondition(lambda self: self.model.running)
    @rule(num_tokens=num_tokens)
    def plan_all(self, num_tokens):
        for index in range(len(self.model.running)):
            self.plan_one(index, num_tokens)

    @precondition(lambda self: self.model.running)
    @rule(index=index, apart=st.booleans())
    def fork(self, index, apart):
        self.model.fork(index, apart)

    @precondition(lambda self: self.model.running)
    @rule(index=index, comes_back=st.booleans())
    def free(self, index, comes_back):
        self.model.free(index, comes_back)

    @precondition(lambda self: self.model.manager.num_cached_blocks)
    @rule(num_tokens=num_tokens, salt=st.integers(0, 1))
    def pin(self, num_tokens, salt):
        self.model.pin(num_tokens, salt)

    @precondition(lambda self: self.model.pins)
    @rule(index=index)
    def unpin(self, index):
        self.model.unpin(index)

    @precondition(lambda self: self.model.running)
    @rule(token=st.integers(0, 1), is_lost=st.sampled_from([False, False, True]))
    def step(self, token, is_lost):
        self.model.step(token, is_lost)

    @invariant()
    def holds(self):
        self.model.check()

    def teardown(self):
        if hasattr(self, "model"):
            self.model.end()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)


def walk(model: Model, rng: random.Random, num_actions: int) -> None:
    """Random actions as often as they occur in a busy engine."""
    for _ in range(num_actions):
        index, num_tokens = rng.randrange(8), rng.randrange(len(PROMPT))
        match rng.choices(range(8), [4, 6, 4, 10, 3, 3, 0.3, 8])[0]:
            case 0:
                model.add(num_tokens, rng.randrange(60), rng.choice([0, 0, 0, 1]), index > 0)
            case 1:
                model.admit(index, rng.choice([0, 0, 0, 1]))
            case 2:
                model.prefill(index, num_tokens)
            case 3:
                model.decode(index)
            case 4:
                model.fork(index, apart=rng.random() < 0.3)
            case 5:
                model.free(index, comes_back=rng.random() < 0.4)
            case 6:
                model.unpin(index) if model.pins else model.pin(num_tokens, index)
            case 7:
                model.step(index % 2, is_lost=rng.random() < 0.1)
        model.check()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 40), (2, 12), (3, 30), (4, 8), (8, 7)])
def test_a_long_random_walk_keeps_every_promise(block_size, num_blocks, caching):
    model = Model(num_blocks, block_size, caching=caching)
    walk(model, random.Random(num_blocks), 3000)
    model.end()
    for event in ("hits", "failures", "copies", "duplicates"):
        assert model.seen[event] > 0 or (block_size == 1 and event == "copies"), model.seen
    assert (model.seen["evictions"] > 0) == caching


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_so_small_that_everything_evicts(seed):
    rng = random.Random(seed)
    for _ in range(60):
        model = Model(rng.randint(1, 5), rng.choice([1, 2, 4, 8, 16]))
        walk(model, rng, 60)
        model.end()
