"""Scheduler: what can never run is refused with its numbers, before anything changes."""

import pytest

from paged_jax.memory.policies import make_memory
from tests.scheduling.fakes import (
    FakeExecutor,
    make_request,
    make_scheduler,
    never_ends,
    outputs,
    run_step,
    run_to_end,
    scheduler_over,
)


def test_a_prompt_as_long_as_the_model_allows_is_refused():
    scheduler = make_scheduler(max_model_len=16)
    with pytest.raises(ValueError, match=r"'a': a prompt of 16 tokens .* max_model_len 16"):
        scheduler.add(make_request("a", 16, max_tokens=1))
    assert not scheduler.has_work


@pytest.mark.parametrize("max_tokens", [None, 6, 7, 10**9])
@pytest.mark.parametrize("kind", [{}, {"n": 2}, {"beam_width": 2}])
def test_output_beyond_the_model_is_cut_off(kind, max_tokens):
    scheduler = make_scheduler(max_model_len=16)
    request = make_request("a", 10, max_tokens=max_tokens, ignore_eos=True, **kind)
    scheduler.add(request)
    assert request.max_tokens == 6
    run_to_end(scheduler, FakeExecutor(scheduler.memory, never_ends))
    if kind.get("beam_width"):
        [first, *_] = request.beam_search.hypotheses
        assert (len(first.token_ids), first.finish_reason) == (6, "length")
    else:
        assert [(len(tokens), end) for tokens, end in outputs(request)] == [
            (6, "length") for _ in request.sequences
        ]


@pytest.mark.parametrize(("policy", "fit"), [("paged", 55), ("orca_oracle", 55), ("orca_pow2", 32)])
def test_an_output_to_the_end_goes_as_far_as_the_pool_allows(policy, fit):
    """16 blocks of 4 slots for a model of 100 tokens; the last token needs no slot."""
    memory = make_memory(policy, 17, 4, max_model_len=100)
    scheduler = scheduler_over(memory, max_model_len=100)
    request = make_request("a", 10, max_tokens=None, ignore_eos=True)
    scheduler.add(request)
    run_to_end(scheduler, FakeExecutor(memory, never_ends))
    assert [(len(tokens), end) for tokens, end in outputs(request)] == [(fit, "length")]
    assert request.num_preemptions == 0


def test_an_output_to_the_end_takes_what_pinned_prefixes_leave():
    scheduler = make_scheduler(num_blocks=17, block_size=4, enable_prefix_caching=True)
    executor = FakeExecutor(scheduler.memory, never_ends)
    prefix = make_request("prefix", 32, max_tokens=1)
    scheduler.add(prefix)
    run_to_end(scheduler, executor)
    assert scheduler.pin(prefix.prompt_token_ids, None) == 32
    other, sharing = (make_request(str(s), 40, seed=s, max_tokens=None) for s in (1, 0))
    with pytest.raises(ValueError, match=r"8 of them are pinned; .* or shorten the prompt"):
        scheduler.add(other)
    scheduler.add(sharing)
    assert sharing.max_tokens == 64 - 40


def test_more_tokens_than_fit_are_refused_as_a_minimum():
    scheduler = make_scheduler(max_model_len=16)
    with pytest.raises(ValueError, match="min_tokens 7 is more than the 6 tokens that fit after"):
        scheduler.add(make_request("a", 10, max_tokens=None, min_tokens=7))
    with pytest.raises(ValueError, match="min_tokens 7 is more than the 6 tokens that fit after"):
        scheduler.add(make_request("a", 10, max_tokens=20, min_tokens=7))
    assert not scheduler.has_work
    scheduler.add(make_request("a", 10, max_tokens=None, min_tokens=6))


def test_what_the_pool_can_never_hold_is_refused():
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    message = (
        r"max_tokens 8 can need 5 blocks of 4 slots, the pool has 4 .* max_tokens to at most 7"
    )
    with pytest.raises(ValueError, match=message):
        scheduler.add(make_request("a", 10, max_tokens=8))
    scheduler.add(make_request("b", 10, max_tokens=7))


def test_a_refusal_leaves_running_requests_untouched():
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    request = make_request("a", 3, max_tokens=5)
    scheduler.add(request)
    executor = FakeExecutor(scheduler.memory, never_ends)
    run_step(scheduler, executor)
    with pytest.raises(ValueError, match="the pool has 4"):
        scheduler.add(make_request("b", 30))
    with pytest.raises(ValueError, match="'a' is running already"):
        scheduler.add(make_request("a", 3))
    run_to_end(scheduler, executor)
    assert outputs(request)[0][1] == "length"


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="'a': the prompt is empty"):
        make_request("a", 0)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_model_len", "max_prefill_seqs"])
def test_limits_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        make_scheduler(**{name: 0})


def test_the_token_budget_must_hold_all_decodes():
    with pytest.raises(ValueError, match="max_num_batched_tokens 7 is less than max_num_seqs 8"):
        make_scheduler(max_num_seqs=8, max_num_batched_tokens=7)


@pytest.mark.parametrize("watermark", [-0.1, 1.0, float("nan")])
def test_the_watermark_is_a_fraction(watermark):
    with pytest.raises(ValueError, match=f"watermark .* got {watermark}"):
        make_scheduler(watermark=watermark)


def test_a_wrong_number_of_sampled_tokens_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3))
    batch = scheduler.schedule()
    with pytest.raises(ValueError, match="2 tokens for 1 samples"):
        scheduler.update(batch, [1, 2])


def test_a_pin_that_would_starve_a_request_is_refused_and_an_earlier_one_stays():
    scheduler = make_scheduler(num_blocks=9, block_size=4, enable_prefix_caching=True)
    executor = FakeExecutor(scheduler.memory, never_ends)

    def compute(name: str, num_prompt: int) -> tuple[int, ...]:
        request = make_request(name, num_prompt, max_tokens=1)
        scheduler.add(request)
        run_to_end(scheduler, executor)
        return request.prompt_token_ids

    def find(name: str) -> int:
        request = make_request(name, 20, max_tokens=1)
        scheduler.add(request)
        run_to_end(scheduler, executor)
        return request.num_cached_tokens

    prefix = compute("short", 8)
    long = compute("long", 16)
    assert long[:8] == prefix
    assert scheduler.pin(prefix, None) == 8
    scheduler.add(make_request("in work", 8, seed=5, max_tokens=17))  # 6 blocks
    message = "pinning 16 tokens would leave less than the 6 blocks of 8 that a request in work"
    with pytest.raises(ValueError, match=message):
        scheduler.pin(long, None)
    assert scheduler.memory.num_pinned_blocks == 2
    run_to_end(scheduler, executor)
    assert find("later") == 8, "evicted, but for what was pinned before"
    assert scheduler.pin(long, None) == 16
    assert scheduler.memory.num_pinned_blocks == 4


def test_a_refused_pin_of_a_pinned_prefix_leaves_it_as_it_was():
    scheduler = make_scheduler(num_blocks=9, block_size=4, enable_prefix_caching=True)
    executor = FakeExecutor(scheduler.memory, never_ends)
    prompt = make_request("", 16).prompt_token_ids
    scheduler.add(make_request("half", 8, max_tokens=1))
    run_to_end(scheduler, executor)
    assert scheduler.pin(prompt, None) == 8
    scheduler.add(make_request("whole", 16, max_tokens=1))
    run_to_end(scheduler, executor)
    scheduler.add(make_request("in work", 8, seed=5, max_tokens=17))
    with pytest.raises(ValueError, match="6 blocks of 8"):
        scheduler.pin(prompt, None)
    assert scheduler.memory.num_pinned_blocks == 2
    run_to_end(scheduler, executor)
    scheduler.memory.check_invariants()
    scheduler.memory.unpin(prompt)
    assert scheduler.memory.num_pinned_blocks == 0


@pytest.mark.parametrize("params", [{"n": 2}, {"beam_width": 2}])
def test_requests_may_need_what_is_pinned_for_them(params):
    """A prefix of more than half of the pool; only who begins with it can use it."""
    scheduler = make_scheduler(num_blocks=13, block_size=4, enable_prefix_caching=True)
    executor = FakeExecutor(scheduler.memory, never_ends)
    scheduler.add(make_request("prefix", 32, max_tokens=1))
    run_to_end(scheduler, executor)
    prompt = make_request("", 32).prompt_token_ids
    assert scheduler.pin(prompt, None) == 32
    request = make_request("a", 36, max_tokens=5, **params)
    other = make_request("b", 36, max_tokens=5, seed=1, **params)
    message = "can need 1[01] blocks of 4 slots, the pool has 12 and 8 of them are pinned"
    with pytest.raises(ValueError, match=message):
        scheduler.add(other)
    with pytest.raises(ValueError, match=message):  # its prompt is computed, pinned or not
        scheduler.add(make_request("c", 36, max_tokens=5, prompt_logprobs=1, **params))
    with pytest.raises(ValueError, match=r"can need [59] blocks of 4 slots, the pool has 12 and 8"):
        scheduler.add(make_request("d", 36, max_tokens=15, **params))
    scheduler.add(request)
    assert request.num_cached_tokens is None
    run_to_end(scheduler, executor)
    assert request.num_cached_tokens == 32
    assert {len(tokens) for tokens, _ in outputs(request)} == {5}
