"""A request of thousands of sequences costs the host no more than as many requests."""

import cProfile

import pytest

from experiments.lib.fake_devices import BranchingDevice
from paged_jax.engine.core import EngineCore
from paged_jax.observability.metrics import Metrics
from tests.scheduling.fakes import make_request, make_scheduler


def num_calls(num_requests: int, n: int, **params) -> int:
    """Function calls, Python's and its own, of an engine's loop until all have ended."""
    scheduler = make_scheduler(
        num_blocks=4000, block_size=16, max_num_seqs=64, max_num_batched_tokens=256
    )
    metrics = Metrics(scheduler)
    core = EngineCore(scheduler, BranchingDevice(scheduler.memory, seed=0), observers=[metrics])
    with cProfile.Profile() as profile:
        for i in range(num_requests):
            core.add(make_request(f"r{i}", 10, seed=i, n=n, **params))
        while scheduler.has_work:
            core.report(core.step())
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize(
    "params",
    [{"ignore_eos": True}, {"stop_token_ids": range(0, 2**15, 7)}],
    ids=["ends together", "ends one by one"],
)
def test_a_thousand_sequences_of_a_request_take_fewer_calls_than_a_thousand_requests(params):
    one = num_calls(1, 1000, max_tokens=8, **params)
    many = num_calls(1000, 1, max_tokens=8, **params)
    assert one < many
    assert num_calls(1, 2000, max_tokens=8, **params) < 2.5 * one, "not the square"
