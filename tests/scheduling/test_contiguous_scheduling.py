"""The scheduler over contiguous memory: same outputs, fewer at a time, nobody is preempted."""

import random

import pytest

from paged_jax.memory.policies import make_memory
from paged_jax.scheduling.scheduler import Scheduler
from tests.scheduling.fakes import (
    FakeExecutor,
    make_request,
    make_scheduler,
    names,
    never_ends,
    outputs,
    run_step,
    run_to_end,
    scheduler_over,
)

POLICIES = ("orca_max", "orca_pow2", "orca_oracle")


def contiguous_scheduler(
    memory_policy: str, num_blocks: int, block_size: int = 4, **limits
) -> Scheduler:
    max_model_len = limits.get("max_model_len", 64)
    memory = make_memory(memory_policy, 1 + num_blocks, block_size, max_model_len=max_model_len)
    return scheduler_over(memory, enable_prefix_caching=False, **limits)


def random_requests(rng: random.Random) -> list[dict]:
    """Arguments of `make_request`: plain ones, samples and beams."""
    requests = []
    for i in range(rng.randint(1, 10)):
        num_prompt = rng.randint(1, 40)
        request = {
            "num_prompt": num_prompt,
            "seed": i,
            "max_tokens": rng.randint(1, 64 - num_prompt),
            "ignore_eos": rng.random() < 0.5,
        }
        kind = rng.choice([{}, {}, {"n": 2}, {"n": 3}, {"beam_width": 2}, {"beam_width": 4}])
        requests.append(request | kind)
    return requests


@pytest.mark.parametrize("policy", POLICIES)
def test_random_requests_get_what_a_paged_scheduler_gives_them(policy):
    rng = random.Random(policy)
    num_copies = 0
    for _ in range(12):
        requests = random_requests(rng)
        block_size = rng.choice([1, 4, 16])
        scheduler = contiguous_scheduler(
            policy,
            num_blocks=(256 + rng.randrange(256)) // block_size,  # four of the longest at least
            block_size=block_size,
            max_num_batched_tokens=rng.choice([8, 20, 64]),
        )
        executor = FakeExecutor(scheduler.memory)
        added = []
        for number, options in enumerate(requests):
            added.append(make_request(str(number), **options))
            scheduler.add(added[-1])
            for _ in range(rng.randrange(4)):
                if scheduler.has_work:
                    run_step(scheduler, executor)
        run_to_end(scheduler, executor)
        assert scheduler.counters.num_preemptions == 0
        num_copies += scheduler.memory.stats.copies
        paged = make_scheduler(num_blocks=1 + 600)
        wanted = [make_request(str(i), **options) for i, options in enumerate(requests)]
        for request in wanted:
            paged.add(request)
        run_to_end(paged, FakeExecutor(paged.memory))
        assert [outputs(request) for request in added] == [outputs(request) for request in wanted]
    assert num_copies > 50


def test_samples_get_a_reservation_each_before_they_start():
    scheduler = contiguous_scheduler("orca_oracle", 64)
    executor = FakeExecutor(scheduler.memory, never_ends)
    request = make_request("r", 10, n=3, max_tokens=7)
    scheduler.add(request)
    batch = run_step(scheduler, executor)
    assert len(batch.sampled) == 3
    assert scheduler.memory.num_free_blocks == 64 - 3 * 4
    batch = run_step(scheduler, executor)
    tables = [scheduler.memory.block_table(seq.seq_id) for seq in request.sequences]
    assert sorted(table[0] for table in tables) == [1, 5, 9]
    assert len(batch.copies) == 2 * 3, "the 10 tokens of the prompt, for two of them"
    run_to_end(scheduler, executor)


def test_samples_without_room_for_all_come_in_later():
    scheduler = contiguous_scheduler("orca_max", 32)  # two of the longest
    executor = FakeExecutor(scheduler.memory, never_ends)
    request = make_request("r", 10, n=3, max_tokens=7)
    scheduler.add(request)
    assert len(run_step(scheduler, executor).sampled) == 2
    batches = run_to_end(scheduler, executor)
    assert [len(batch.sampled) for batch in batches] == [2] * 6 + [1] * 7


def test_beams_have_room_to_branch_in_a_pool_that_is_full():
    scheduler = contiguous_scheduler("orca_oracle", 32)
    executor = FakeExecutor(scheduler.memory)
    search = make_request("beams", 20, beam_width=4, max_tokens=13)  # 4 chunks of 8 blocks
    other = make_request("other", 20, max_tokens=13)
    scheduler.add(search)
    scheduler.add(other)
    for _ in range(5):
        assert names(run_step(scheduler, executor).sampled)[-1] == "beams"
    assert scheduler.memory.num_free_blocks == 0
    assert scheduler.num_waiting == 1
    run_to_end(scheduler, executor)
    assert search.is_finished
    assert other.is_finished


@pytest.mark.parametrize(
    ("policy", "options", "needed"),
    [
        ("orca_max", {"beam_width": 3}, 3 * 16),
        ("orca_oracle", {"beam_width": 5, "max_tokens": 20}, 5 * 8),
        ("orca_pow2", {"max_tokens": 33}, None),
    ],
)
def test_what_can_never_be_reserved_is_refused(policy, options, needed):
    scheduler = contiguous_scheduler(policy, 32)
    request = make_request("r", 10, **{"max_tokens": 5} | options)
    if needed is None:
        scheduler.add(request)
        return
    with pytest.raises(ValueError, match=f"can need {needed} blocks of 4 slots, the pool has 32"):
        scheduler.add(request)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [{}, {"n": 2}, {"beam_width": 2}])
def test_what_lost_the_cache_reserves_as_much_again(policy, kind):
    """Whenever that is, in a pool that has just enough for what it reserved at first."""
    arguments = {"max_tokens": 16, "ignore_eos": True} | kind
    chunk = {"orca_max": 64}.get(policy, 32)
    for when in range(1, 17):
        scheduler = contiguous_scheduler(policy, 2 * chunk if kind else chunk, block_size=1)
        executor = FakeExecutor(scheduler.memory)
        request = make_request("r", 10, **arguments)
        scheduler.add(request)
        for _ in range(when):
            run_step(scheduler, executor)
        executor.slots.clear()
        scheduler.recover(cache_lost=True)
        for _ in range(20):
            if scheduler.has_work:
                run_step(scheduler, executor)
        assert request.is_finished
        assert scheduler.counters.num_preemptions == 0


def test_static_batching_over_reservations_is_fastertransformer():
    """Seven fit; nobody joins until the longest of them has ended."""
    scheduler = contiguous_scheduler("orca_max", 7 * 16, policy="static")
    executor = FakeExecutor(scheduler.memory, never_ends)
    for number in range(9):
        scheduler.add(make_request(str(number), 4, max_tokens=1 + 3 * number))
    sizes = [len(batch.sampled) for batch in run_to_end(scheduler, executor)]
    assert sizes[0] == 7
    assert sizes[: 1 + 3 * 6] == sorted(sizes[: 1 + 3 * 6], reverse=True)
    assert sizes[1 + 3 * 6] == 2
