"""What requests have in common is computed and stored once, and no output shows it."""

from itertools import takewhile

import pytest

from paged_jax import SamplingParams
from tests.conftest import assert_idle
from tests.engine.mixed_requests import BOS, TEXT, serve
from tests.engine.shared_requests import shared_requests

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [BOS, *TEXT[500:].encode()[:69]]


def salted(salt, **changes) -> SamplingParams:
    """Greedy, with a cache of its own: engines are shared with other tests."""
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 8, "ignore_eos": True, "cache_salt": salt} | changes
    )


@pytest.fixture(scope="module")
def requests():
    return shared_requests()


@pytest.fixture(scope="module")
def wanted(engine_with, requests):
    """As served one at a time, without the prefix cache."""
    engine = engine_with(enable_prefix_caching=False)
    outputs = [serve(engine, [request])[0] for request in requests]
    assert engine.core.scheduler.counters.num_preemptions == 0
    return outputs


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
@pytest.mark.parametrize(
    "block_size",
    [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(16, marks=pytest.mark.slow)],
)
def test_output_is_the_same_with_and_without_the_prefix_cache(
    engine_with, requests, wanted, block_size, caching
):
    """In a pool that holds the longest request and little more: it evicts and preempts."""
    engine = engine_with(
        block_size=block_size, num_blocks=224 // block_size, enable_prefix_caching=caching
    )
    stats, scheduler = engine.sharing_stats, engine.core.scheduler
    num_preemptions = scheduler.counters.num_preemptions
    assert serve(engine, requests) == wanted
    assert scheduler.counters.num_preemptions > num_preemptions
    after = engine.sharing_stats
    assert after.forks > stats.forks
    assert (after.copies > stats.copies) == (block_size > 1)
    assert (after.evictions > stats.evictions) == caching
    if caching:
        assert serve(engine, requests[::-1]) == wanted[::-1]
        assert after.hit_tokens - stats.hit_tokens > 500


def test_a_prompt_given_again_is_not_computed_again(engine, monkeypatch):
    steps = []
    monkeypatch.setattr(engine.core, "on_iteration", steps.append)
    first, again = (engine.generate(PROMPT, salted("again"), progress=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert sum(step.num_prefill_tokens for step in steps) == len(PROMPT) + len(PROMPT) - 64


def test_what_was_generated_is_found_as_well(engine):
    [first] = engine.generate(PROMPT, salted("whole", max_tokens=60), progress=False)
    longer = [*PROMPT, *first.outputs[0].token_ids]
    [second] = engine.generate(longer, salted("whole"), progress=False)
    # The last token's keys and values are never computed.
    assert second.num_cached_tokens == (len(longer) - 1) // 16 * 16 == 128


def test_each_turn_of_a_chat_finds_the_turns_before(engine):
    messages, computed, cached = [], [], []
    for question in ("What is a class?", "And a function?", "What does it return?", "Why?"):
        messages.append({"role": "user", "content": question})
        [output] = engine.chat(messages, salted("chat", max_tokens=40), progress=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        cached.append(output.num_cached_tokens)
        # All that is the same when the text comes back as tokens.
        prompt = list(output.prompt_token_ids)
        pairs = zip(prompt[:-1], computed, strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert cached[-1] == num_common // 16 * 16
        computed = [*prompt, *output.outputs[0].token_ids[:-1]]
    assert cached == sorted(set(cached)), "more from turn to turn"


def test_salts_keep_tenants_apart(engine):
    found = {}
    for salt in ("a", "b", None, "a", "b", None):
        [output] = engine.generate([66, *PROMPT], salted(salt), progress=False)
        found.setdefault(salt, []).append(output.num_cached_tokens)
    assert found == {"a": [0, 64], "b": [0, 64], None: [0, 64]}


def test_a_pinned_prefix_outlives_any_pressure(engine_with):
    engine = engine_with(block_size=4, num_blocks=56)
    prefix, memory = [67, *PROMPT[:49]], engine.core.scheduler.memory
    assert engine.pin_prefix(prefix, cache_salt="pinned") == 48
    assert memory.num_pinned_blocks == 12
    for i in range(4):
        engine.generate(
            [70 + i, *TEXT[:100].encode()], salted(f"{i}", max_tokens=60), progress=False
        )
    [output] = engine.generate([*prefix, *PROMPT[:20]], salted("pinned"), progress=False)
    assert output.num_cached_tokens == 48
    [other] = engine.generate([*prefix, *PROMPT[:20]], salted("other"), progress=False)
    assert other.num_cached_tokens == 0
    assert other.outputs[0].token_ids == output.outputs[0].token_ids
    too_large = SamplingParams(max_tokens=80)
    with pytest.raises(ValueError, match="the pool has 56 and 12 of them are pinned"):
        engine.generate([70] * 100, too_large, progress=False)
    engine.unpin_prefix(prefix, cache_salt="pinned")
    assert_idle(engine)
    for i in range(4):
        engine.generate(
            [70 + i, *TEXT[:100].encode()], salted(f"{i}", max_tokens=60), progress=False
        )
    [output] = engine.generate([*prefix, *PROMPT[:20]], salted("pinned"), progress=False)
    assert output.num_cached_tokens == 0
    with pytest.raises(KeyError, match=f"these {len(prefix)} tokens are not pinned"):
        engine.unpin_prefix(prefix, cache_salt="pinned")


def test_a_prefix_is_pinned_between_requests_that_run(engine, monkeypatch):
    steps = []
    name = engine.add_request(None, PROMPT, salted("runs", max_tokens=40))
    assert engine.pin_prefix("A function definition is an object", cache_salt="pin") == 32
    monkeypatch.setattr(engine.core, "on_iteration", steps.append)
    assert engine.pin_prefix("A function definition is an object", cache_salt="pin") == 32
    assert sum(step.num_prefill_tokens for step in steps) == 34 - 32, "it was there"
    while engine.has_work:
        [output] = engine.step() or [None]
    assert output.request_id == name
    engine.unpin_prefix("A function definition is an object", cache_salt="pin")


def test_without_the_prefix_cache_nothing_is_found_or_pinned(engine_with):
    engine = engine_with(enable_prefix_caching=False)
    for _ in range(2):
        [output] = engine.generate(PROMPT, GREEDY, progress=False)
        assert output.num_cached_tokens == 0
    num_iterations = engine.core.num_iterations
    with pytest.raises(ValueError, match="nothing can be pinned: prefix caching is off"):
        engine.pin_prefix(PROMPT)
    assert engine.core.num_iterations == num_iterations, "refused before anything is computed"
