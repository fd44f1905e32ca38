"""Faults that sharing has had elsewhere, one by one: found too much, too early, too late, twice."""

import pytest

from paged_jax import SamplingParams
from paged_jax.executor import jax_executor
from tests.conftest import assert_idle
from tests.engine.mixed_requests import TEXT

# Text that no two of the tests below begin alike, so that engines can be shared.
LONG = TEXT[2000:].encode()


def prompt_of(name: str, length: int) -> list[int]:
    """Text that begins with the name, or with part of it."""
    return list(f"{name}: ".encode() + LONG)[:length]


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | changes
    )


@pytest.fixture(scope="module")
def expected(engine_with):
    """(prompt, params) -> the tokens of each continuation, served without the prefix cache."""

    def tokens(prompt, params):
        engine = engine_with(enable_prefix_caching=False)
        [output] = engine.generate(prompt, params, progress=False)
        return tokens_of(output)

    return tokens


@pytest.fixture
def small(engine_with):
    """56 blocks of 4 slots."""
    return engine_with(block_size=4, num_blocks=56)


def tokens_of(output) -> list[list[int]]:
    return [out.token_ids for out in output.outputs]


def finish(engine) -> dict:
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def num_used(engine) -> int:
    memory = engine.core.scheduler.memory
    return memory.num_total_blocks - memory.num_free_blocks


@pytest.mark.parametrize(
    ("block_size", "length", "cached"), [(4, 4, 0), (4, 8, 4), (1, 1, 0), (1, 2, 1), (4, 9, 8)]
)
def test_a_prompt_of_whole_blocks_given_twice(engine_with, expected, block_size, length, cached):
    """Of one, and of two: the last block is computed again, as some token has to be."""
    engine = engine_with(block_size=block_size, num_blocks=224 // block_size)
    prompt, params = prompt_of("t", length), greedy(12, cache_salt=f"twice {length}")
    outputs = [engine.generate(prompt, params, progress=False)[0] for _ in range(3)]
    assert [output.num_cached_tokens for output in outputs] == [0, cached, cached]
    for output in outputs:
        assert tokens_of(output) == expected(prompt, params)


@pytest.mark.parametrize("length", [4, 8, 10])
def test_the_same_prompt_several_times_in_one_step(small, expected, length):
    """Nobody can use what the others are computing; afterwards one of each is cached."""
    prompt, params = prompt_of("step", length), greedy(10, cache_salt=f"step {length}")
    for i in range(3):
        small.add_request(f"{i}", prompt, params)
    small.step()
    assert small.core.scheduler.num_running == 3
    outputs = finish(small)
    assert [outputs[f"{i}"].num_cached_tokens for i in range(3)] == [0, 0, 0]
    assert [tokens_of(outputs[f"{i}"]) for i in range(3)] == [expected(prompt, params)] * 3
    [after] = small.generate(prompt, params, progress=False)
    assert after.num_cached_tokens == (length - 1) // 4 * 4


def test_a_block_that_is_only_scheduled_to_be_written_is_no_hit(small, expected):
    """The second prompt joins the step that computes the first, and is cut short in it."""
    prompt, params = prompt_of("scheduled", 20), greedy(10)
    for i in range(2):
        small.add_request(f"{i}", prompt, params)
    small.step()  # 20 tokens and 12
    small.add_request("2", prompt, params)
    outputs = finish(small)
    assert [outputs[f"{i}"].num_cached_tokens for i in range(3)] == [0, 0, 16]
    assert [tokens_of(outputs[f"{i}"]) for i in range(3)] == [expected(prompt, params)] * 3


def test_a_hit_that_is_evicted_while_its_request_waits(small, expected):
    prefix = prompt_of("hit then gone", 80)
    small.generate(prefix, greedy(1), progress=False)
    old = prompt_of("old", 100), greedy(110)
    late = [*prefix, *LONG[300:350]], greedy(8)
    small.add_request("old", *old)
    small.add_request("late", *late)  # 33 blocks, and 31 are free
    evictions = small.sharing_stats.evictions
    outputs = finish(small)
    assert small.sharing_stats.evictions > evictions
    assert 0 < outputs["late"].num_cached_tokens < 80, "the beginning is evicted last"
    assert tokens_of(outputs["old"]) == expected(*old)
    assert tokens_of(outputs["late"]) == expected(*late)


def test_preempted_partly_evicted_resumed(small, expected):
    old = prompt_of("older", 60), greedy(150)
    young = prompt_of("younger", 60), greedy(100)
    small.add_request("old", *old)
    small.add_request("young", *young)
    scheduler = small.core.scheduler
    before, recomputed = (
        scheduler.counters.num_preemptions,
        scheduler.counters.num_recomputed_tokens,
    )
    while scheduler.counters.num_preemptions == before:
        small.step()
    lost = scheduler.counters.num_recomputed_tokens - recomputed
    hits = small.sharing_stats.hit_tokens
    outputs = finish(small)
    found = small.sharing_stats.hit_tokens - hits
    assert 0 < found < lost - 4, "some of its blocks are there still"
    assert tokens_of(outputs["old"]) == expected(*old)
    assert tokens_of(outputs["young"]) == expected(*young)


def test_a_pool_so_small_that_every_step_evicts(engine_with, expected):
    engine = engine_with(block_size=1, num_blocks=224)
    requests = [(prompt_of(f"{i} evicts", 90), greedy(40, cache_salt="evicts")) for i in range(4)]
    requests.append(requests[-1])
    for number, request in enumerate(requests):
        name = engine.add_request(None, *request)
        evictions, outputs = [engine.sharing_stats.evictions], []
        while not outputs:
            outputs = engine.step()
            evictions.append(engine.sharing_stats.evictions)
        assert (outputs[0].request_id, tokens_of(outputs[0])) == (name, expected(*request))
        if number in (2, 3):
            decodes = evictions[-40:]
            assert decodes == sorted(set(decodes)), "one more from step to step"
    assert outputs[0].num_cached_tokens == 89


def test_several_samples_of_a_cached_prompt(small, expected):
    prompt = prompt_of("samples", 30)
    small.generate(prompt, greedy(1), progress=False)
    params = SamplingParams(n=4, seed=5, max_tokens=20)
    [output] = small.generate(prompt, params, progress=False)
    assert output.num_cached_tokens == 28
    assert tokens_of(output) == expected(prompt, params)


def test_the_abort_of_a_request_leaves_those_that_share_its_blocks(small, expected):
    prompt = prompt_of("abort", 41)
    params = SamplingParams(n=2, seed=6, max_tokens=30, ignore_eos=True)
    small.generate(prompt, greedy(1), progress=False)
    small.add_request("gone", prompt, params)
    small.add_request("stays", prompt, params)
    for _ in range(6):
        small.step()
    held = num_used(small)
    small.abort("gone")
    small.core.scheduler.memory.check_invariants()
    # What was its alone: of each sample the block that its prompt ends in, and what followed.
    assert 2 <= held - num_used(small) <= 6
    assert tokens_of(finish(small)["stays"]) == expected(prompt, params)
    assert num_used(small) == 0


def test_a_stop_string_ends_one_sample_and_its_blocks_are_free_at_once(small, expected, engine):
    prompt = prompt_of("stop", 33)
    params = {"n": 4, "seed": 9, "max_tokens": 40, "ignore_eos": True}
    [whole] = engine.generate(prompt, SamplingParams(**params), progress=False)
    texts = [out.text for out in whole.outputs]
    # Three letters that only one of them says.
    stop = next(
        texts[1][i : i + 3]
        for i in range(6, 30)
        if sum(texts[1][i : i + 3] in text for text in texts) == 1
    )
    small.add_request("n", prompt, SamplingParams(**params, stop=stop))
    small.step()
    scheduler = small.core.scheduler
    while scheduler.num_running != 3:
        small.step()
    tables = [scheduler.memory.block_table(seq.seq_id) for seq in scheduler.queues.decoding]
    assert num_used(small) == len(set().union(*tables))
    outputs = finish(small)["n"].outputs
    for out, text in zip(outputs, texts, strict=True):
        assert out.text == (text[: text.index(stop)] if stop in text else text)
    assert [out.finish_reason for out in outputs] == ["length", "stop", "length", "length"]


@pytest.mark.parametrize("fails", ["before the copies", "after the copies"])
def test_a_step_that_fails_loses_no_copy(small, expected, monkeypatch, fails):
    """Two samples diverge in the block that they share; the step that copies it is interrupted."""
    prompt = prompt_of(fails, 30)
    params = SamplingParams(n=3, seed=7, max_tokens=12)
    small.add_request("n", prompt, params)
    copies = small.sharing_stats.copies
    small.step()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        step = "copy_step" if fails == "before the copies" else "decode_step"
        patch.setattr(jax_executor, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            small.step()
    assert (small.sharing_stats.copies > copies) == (fails == "after the copies")
    assert tokens_of(finish(small)["n"]) == expected(prompt, params)
    assert small.sharing_stats.copies - copies == 2
    assert_idle(small)


def test_equal_tokens_after_different_ones_are_no_hit(small, expected):
    """A block is found by all tokens before it, not by its own."""
    common = list(LONG[:40])
    for first, cached in (("1234", 0), ("12341234", 4), ("4321", 0), ("1234", 40), ("", 0)):
        prompt = [*first.encode(), *common]
        [output] = small.generate(prompt, greedy(8, cache_salt="own"), progress=False)
        assert output.num_cached_tokens == cached
        assert tokens_of(output) == expected(prompt, greedy(8))
