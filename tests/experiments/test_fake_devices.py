"""Executors that stand in for a device answer each sample of a batch; notes of batches are kept."""

import time

import pytest

from experiments.lib.fake_devices import (
    TOKEN,
    BatchRecorder,
    BranchingDevice,
    ConstantDevice,
    endless_requests,
    make_loop,
)
from paged_jax.engine.core import EngineCore
from tests.scheduling.fakes import make_request, make_scheduler, outputs


def test_a_constant_device_answers_all_with_its_token():
    scheduler = make_scheduler()
    core = EngineCore(scheduler, ConstantDevice(scheduler.memory))
    requests = [make_request(name, 5, max_tokens=4) for name in "ab"]
    for request in requests:
        core.add(request)
    while scheduler.has_work:
        core.step()
    assert [outputs(request) for request in requests] == [[([TOKEN] * 4, "length")]] * 2


def test_a_branching_device_draws_the_same_with_the_same_seed():
    def drawn(seed: int, **params) -> list:
        scheduler = make_scheduler(eos_token_ids=())
        core = EngineCore(scheduler, BranchingDevice(scheduler.memory, seed=seed))
        request = make_request("a", 5, max_tokens=6, **params)
        core.add(request)
        while scheduler.has_work:
            core.step()
        return outputs(request)

    assert drawn(0) == drawn(0) != drawn(1)
    beams = drawn(0, beam_width=3, n=3, temperature=0)
    assert [(len(tokens), reason) for tokens, reason in beams] == [(6, "length")] * 3
    assert beams == drawn(0, beam_width=3, n=3, temperature=0)


def test_notes_are_of_each_batch_and_taken_once():
    scheduler = make_scheduler()
    recorder = BatchRecorder(
        ConstantDevice(scheduler.memory), lambda batch: [batch.num_prefill_tokens] * 2
    )
    core = EngineCore(scheduler, recorder)
    core.add(make_request("a", 5, max_tokens=3))
    while scheduler.has_work:
        core.step()
    assert recorder.take() == [5, 5, 0, 0, 0, 0]
    assert recorder.take() == []
    assert not recorder.cache_is_lost


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_sleeping_device_takes_its_time_and_builds_the_arrays(is_pipelined):
    core, device = make_loop(
        2, block_size=4, mean_prompt=8, mean_output=8, device_s=0.01, is_pipelined=is_pipelined
    )
    requests = endless_requests(0, mean_prompt=8, mean_output=8)
    for _ in range(2):
        core.add(next(requests))
    start, num_steps = time.perf_counter(), 0
    while core.scheduler.has_work:
        core.step()
        num_steps += 1
    assert len(device.arrays_s) >= num_steps - 1 > 0
    assert all(seconds > 0 for seconds in device.arrays_s)
    assert time.perf_counter() - start >= 0.01 * len(device.arrays_s)
