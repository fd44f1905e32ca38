"""Swapping under random sequences, forks, evictions and faults: what comes back is what went."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.memory.memory_model import PROMPT
from tests.memory.swap_model import SwapModel
from tests.memory.test_block_manager_properties import ManagerMachine, index


class SwapMachine(ManagerMachine):
    """All that `ManagerMachine` does, with a host pool that may be too small or not there."""

    @initialize(
        num_blocks=st.integers(1, 20),
        block_size=st.sampled_from([1, 2, 4, 16]),
        caching=st.booleans(),
        num_swap_blocks=st.sampled_from([0, 1, 3, 8, 40]),
    )
    def start(self, num_blocks, block_size, caching, num_swap_blocks):
        self.model = SwapModel(
            num_blocks, block_size, caching=caching, num_swap_blocks=num_swap_blocks
        )

    @precondition(lambda self: self.model.running)
    @rule(indices=st.sets(index, min_size=1))
    def swap_out(self, indices):
        self.model.swap_out(indices)

    @precondition(lambda self: self.model.swapped)
    @rule(index=index, keep=st.integers(0, 2))
    def swap_in(self, index, keep):
        self.model.swap_in(index, keep)

    @precondition(lambda self: self.model.swapped)
    @rule(index=index, member=index)
    def free_swapped(self, index, member):
        self.model.free_swapped(index, member)

    @precondition(lambda self: self.model.running)
    @rule(index=index)
    def discard(self, index):
        self.model.discard(index)

    @rule(stage=st.integers(0, 2))
    def fail(self, stage):
        self.model.fail(stage)

    @precondition(lambda self: self.model.running or self.model.swapped)
    @rule()
    def lose_device(self):
        self.model.lose_device()


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)


def walk(model: SwapModel, rng: random.Random, num_actions: int) -> None:
    """Random actions as often as they occur in an engine that swaps a lot."""
    for _ in range(num_actions):
        index, num_tokens = rng.randrange(8), rng.randrange(len(PROMPT))
        match rng.choices(range(11), [4, 6, 4, 10, 3, 2, 8, 3, 5, 0.5, 1.5])[0]:
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
                model.step(index % 2, is_lost=rng.random() < 0.1)
            case 7:
                model.swap_out({index, rng.randrange(8), rng.randrange(8)})
            case 8:
                model.swap_in(index, rng.choice([0, 0, 0, 1]))
            case 9:
                model.discard(index) if index % 2 else model.free_swapped(index, num_tokens)
            case 10 if rng.random() < 0.8:
                model.fail(index % 3)
            case 10:
                model.swap_out({index})
                model.lose_device()
        model.check()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("block_size", "num_blocks", "num_swap_blocks"),
    [(1, 40, 60), (2, 16, 30), (3, 30, 9), (4, 8, 100), (8, 7, 4)],
)
def test_a_long_random_walk_restores_all_it_swaps(block_size, num_blocks, num_swap_blocks, caching):
    model = SwapModel(num_blocks, block_size, caching=caching, num_swap_blocks=num_swap_blocks)
    walk(model, random.Random(num_blocks), 1500)
    model.end()
    for event in ("out", "in", "shared", "back", "failures"):
        assert model.seen[event] > 0, model.seen
    assert (model.seen["no_room"] > 0) or num_swap_blocks > 50, model.seen
    assert model.seen["restored_hits"] > 0 or not caching, model.seen


@pytest.mark.parametrize("seed", range(3))
def test_pools_of_a_few_blocks(seed):
    rng = random.Random(seed)
    for _ in range(60):
        model = SwapModel(
            rng.randint(1, 5), rng.choice([1, 2, 4, 8]), num_swap_blocks=rng.randint(0, 4)
        )
        walk(model, rng, 60)
        model.end()
