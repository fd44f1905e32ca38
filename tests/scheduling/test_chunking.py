"""Scheduler: prompts in chunks or whole, and prefill held back by a target between tokens."""

from types import SimpleNamespace

import pytest

from paged_jax.scheduling.estimates import StepEstimates
from tests.scheduling.fakes import (
    FakeExecutor,
    chunks,
    make_request,
    make_scheduler,
    names,
    never_ends,
    run_step,
    run_to_end,
)


def whole_prompts(**limits):
    limits = {"max_num_batched_tokens": 16, "max_model_len": 16, "max_num_seqs": 8} | limits
    return make_scheduler(enable_chunked_prefill=False, **limits)


def test_without_chunks_a_prompt_is_computed_in_one_iteration_beside_decodes():
    scheduler = whole_prompts()
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "abc":
        scheduler.add(make_request(name, 2, max_tokens=9))
    run_step(scheduler, executor)
    scheduler.add(make_request("long", 15, max_tokens=1))  # with three decodes 18 of 16 tokens
    batch = run_step(scheduler, executor)
    assert (names(batch.decodes), chunks(batch)) == (["a", "b", "c"], [("long", 0, 15)])


def test_without_chunks_a_prompt_that_does_not_fit_beside_others_comes_first_in_the_next():
    scheduler = whole_prompts()
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name, num_prompt in (("a", 10), ("b", 8), ("c", 2)):
        scheduler.add(make_request(name, num_prompt, max_tokens=1))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 10)]
    assert chunks(run_step(scheduler, executor)) == [("b", 0, 8), ("c", 0, 2)]


def test_without_chunks_a_prompt_that_does_not_fit_is_not_passed_by_a_smaller_one():
    scheduler = whole_prompts(policy="static")
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name, num_prompt in (("a", 10), ("b", 8), ("c", 2)):
        scheduler.add(make_request(name, num_prompt, max_tokens=1))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 10)]
    assert scheduler.num_running == 2, "all are admitted, and a has ended"
    assert chunks(run_step(scheduler, executor)) == [("b", 0, 8), ("c", 0, 2)]


def test_without_chunks_prompts_are_not_cut_to_save_padding_either():
    scheduler = whole_prompts(prefill_sizes=(2, 16))
    scheduler.add(make_request("a", 7, max_tokens=1))
    batches = run_to_end(scheduler, FakeExecutor(scheduler.memory, never_ends))
    assert [chunks(batch) for batch in batches] == [[("a", 0, 7)]]


def test_without_chunks_only_what_is_not_cached_counts():
    scheduler = whole_prompts(enable_prefix_caching=True)
    executor = FakeExecutor(scheduler.memory, never_ends)
    for name in "ab":
        scheduler.add(make_request(name, 14, prompt_seed=0, max_tokens=1))
    assert chunks(run_step(scheduler, executor)) == [("a", 0, 14)]
    scheduler.add(make_request("c", 14, prompt_seed=0, max_tokens=1))
    assert chunks(run_step(scheduler, executor)) == [("b", 12, 2), ("c", 12, 2)]


def test_without_chunks_any_prompt_must_fit_in_an_iteration():
    message = "max_num_batched_tokens 15 is less than max_model_len 16: without chunked prefill"
    with pytest.raises(ValueError, match=message):
        whole_prompts(max_num_batched_tokens=15)


def estimates_of(decode_s: float, fixed_s: float, token_s: float) -> StepEstimates:
    """After a decode and two prefills that took so long."""
    estimates = StepEstimates()

    def observe(num_decodes: int, num_tokens: int, seconds: float) -> None:
        batch = SimpleNamespace(
            decodes=[None] * num_decodes,
            prefills=[None] * bool(num_tokens),
            num_prefill_tokens=num_tokens,
            swap_outs=[],
            swap_ins=[],
        )
        estimates.observe(batch, SimpleNamespace(device_s=seconds, swap_s=0.0))

    observe(3, 0, decode_s)
    for num_tokens in (10, 30):
        observe(0, num_tokens, fixed_s + token_s * num_tokens)
    return estimates


def chunks_beside_a_decode(**limits):
    """The chunks of a prompt of 40 tokens that arrives while another request decodes."""
    scheduler = make_scheduler(max_num_batched_tokens=40, max_model_len=80, **limits)
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("a", 4, max_tokens=50))
    run_step(scheduler, executor)
    scheduler.add(make_request("b", 40, max_tokens=1))
    return [num_tokens for b in run_to_end(scheduler, executor) for *_, num_tokens in chunks(b)]


@pytest.mark.parametrize(
    ("target_s", "expected"),
    [
        (None, [39, 1]),
        (100.0, [39, 1]),
        (7.1, [20, 20]),  # 2 s of decode, 1 s and 0.2 s a token of prefill
        (4.9, [9, 9, 9, 9, 4]),
        (3.3, [1] * 40),
    ],
)
def test_a_target_between_tokens_holds_back_prefill(target_s, expected):
    estimates = estimates_of(decode_s=2.0, fixed_s=1.0, token_s=0.2)
    found = chunks_beside_a_decode(target_inter_token_s=target_s, estimates=estimates)
    assert found == expected


def test_a_target_that_cannot_be_met_starves_nobody():
    """Nor does it make the executor pad: a chunk is at least the smallest step."""
    estimates = estimates_of(decode_s=2.0, fixed_s=1.0, token_s=0.2)
    limits = {"target_inter_token_s": 0.5, "estimates": estimates}
    assert chunks_beside_a_decode(prefill_sizes=(5, 40), **limits) == [5] * 8


def test_without_decodes_the_target_does_not_count():
    estimates = estimates_of(decode_s=2.0, fixed_s=1.0, token_s=0.2)
    scheduler = make_scheduler(target_inter_token_s=2.5, estimates=estimates)
    scheduler.add(make_request("a", 40, max_tokens=1))
    assert chunks(scheduler.schedule()) == [("a", 0, 40)]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_the_target_is_a_time(seconds):
    with pytest.raises(ValueError, match=f"target_inter_token_s must be .* got {seconds}"):
        make_scheduler(target_inter_token_s=seconds)


def test_the_target_needs_chunks():
    with pytest.raises(ValueError, match="leave enable_chunked_prefill on"):
        whole_prompts(target_inter_token_s=1.0)


def gaps_between_tokens(**limits) -> list[float]:
    """Of 45 requests, more than can be served, of which 5 have 4096 tokens of prompt; sorted.

    By a clock that counts steps: 50 ms for all decodes, 2.5 ms a prefill token.
    """
    scheduler = make_scheduler(
        num_blocks=1200, block_size=16, max_num_seqs=16, max_model_len=4200, **limits
    )
    upcoming = [
        make_request(
            str(i),
            4096 if i % 9 == 4 else 32,
            arrival=1.0 * i,
            max_tokens=8 if i % 9 == 4 else 48,
            ignore_eos=True,
        )
        for i in range(45)
    ]
    now, gaps, last_s = 0.0, [], {}
    while upcoming or scheduler.has_work:
        while upcoming and upcoming[0].arrival_time <= now:
            scheduler.add(upcoming.pop(0))
        if not scheduler.has_work:
            now = upcoming[0].arrival_time
            continue
        batch = scheduler.schedule()
        now += 0.05 * bool(batch.decodes) + 0.0025 * batch.num_prefill_tokens
        for seq in batch.sampled:
            gaps += [now - last_s[seq]] if seq in last_s else []
            last_s[seq] = now
        scheduler.update(batch, [7] * batch.num_samples)
    return sorted(gaps)


def test_chunks_bound_the_time_between_tokens_where_long_prompts_arrive():
    chunked = gaps_between_tokens(max_num_batched_tokens=256)
    whole = gaps_between_tokens(max_num_batched_tokens=4200, enable_chunked_prefill=False)
    assert len(chunked) == len(whole)
    p99 = 99 * len(whole) // 100
    assert chunked[p99] <= 0.5 * whole[p99]
    assert whole[-1] > 4096 * 0.0025
    assert chunked[-1] <= 0.05 + 256 * 0.0025, "a full iteration is the longest pause"
