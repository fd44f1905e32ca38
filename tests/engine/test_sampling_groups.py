"""Several samples of one prompt: prefilled once, stored once, independent of each other."""

import pytest

from paged_jax import SamplingParams
from tests.engine.mixed_requests import BOS, TEXT

PROMPT = [BOS, *TEXT[5000:].encode()[:65]]  # four blocks of 16, and a bit


@pytest.fixture
def steps(engine, monkeypatch):
    """Statistics of the engine's iterations."""
    steps = []
    monkeypatch.setattr(engine.core, "on_iteration", steps.append)
    return steps


@pytest.fixture(scope="module")
def alone(engine_with):
    """(prompt, params) -> (tokens, sum of log-probabilities) of each sample.

    One sequence at a time, so that nothing forks, and without the prefix cache.
    """

    def samples(prompt, params):
        engine = engine_with(max_num_seqs=1, max_num_batched_tokens=32, enable_prefix_caching=False)
        forks = engine.sharing_stats.forks
        [output] = engine.generate(prompt, params, progress=False)
        assert engine.sharing_stats.forks == forks
        return [out.token_ids for out in output.outputs]

    return samples


def num_used(engine) -> int:
    memory = engine.core.scheduler.memory
    return memory.num_total_blocks - memory.num_free_blocks


def used_after_prefill(engine, requests) -> int:
    """Blocks in use when all of these have their first token."""
    names = [engine.add_request(None, *request) for request in requests]
    num_seqs = sum(params.n for _, params in requests)
    while len(engine.core.scheduler.queues.decoding) < num_seqs:
        engine.step()
    used = num_used(engine)
    for name in names:
        engine.abort(name)
    return used


def test_four_samples_take_less_than_half_the_blocks_of_four_requests(engine):
    def params(**changes):
        return SamplingParams(max_tokens=20, seed=1, ignore_eos=True, **changes)

    together = used_after_prefill(engine, [(PROMPT, params(n=4))])
    apart = used_after_prefill(engine, [(PROMPT, params(cache_salt=f"{i}")) for i in range(4)])
    assert (together, apart) == (5, 20)


def test_when_they_diverge_each_copies_the_block_that_the_prompt_ends_in(engine):
    stats = engine.sharing_stats
    name = engine.add_request(None, PROMPT, SamplingParams(n=4, seed=2, max_tokens=20))
    while len(engine.core.scheduler.queues.decoding) < 4:
        engine.step()
    for _ in range(5):
        engine.step()
    assert num_used(engine) == 4 + 4
    after = engine.sharing_stats
    assert (after.forks - stats.forks, after.copies - stats.copies) == (3, 3)
    engine.abort(name)


def test_a_prompt_of_whole_blocks_copies_nothing(engine):
    copies = engine.sharing_stats.copies
    engine.generate(PROMPT[:64], SamplingParams(n=4, seed=2, max_tokens=20), progress=False)
    assert engine.sharing_stats.copies == copies


def test_the_prompt_is_computed_once(engine, steps):
    params = SamplingParams(n=4, seed=3, max_tokens=5, cache_salt="once")
    engine.generate(PROMPT, params, progress=False)
    assert sum(step.num_prefill_tokens for step in steps) == len(PROMPT)
    assert len(steps) == 3 + 4, "all have their first token from the third chunk"


@pytest.mark.parametrize("caching", [True, False])
def test_those_for_which_there_is_no_room_come_later(engine_with, alone, monkeypatch, caching):
    """They find the prompt in the cache; without it, only what others hold at the time."""
    engine, steps = engine_with(enable_prefix_caching=caching), []
    monkeypatch.setattr(engine.core, "on_iteration", steps.append)
    params = SamplingParams(n=10, seed=4, max_tokens=12, ignore_eos=True, cache_salt="later")
    [output] = engine.generate(PROMPT, params, progress=False)
    assert [out.token_ids for out in output.outputs] == alone(PROMPT, params)
    assert output.num_cached_tokens == 0, "of the first, which found nothing"
    again = len(PROMPT) - 64 if caching else len(PROMPT)  # all samples end in the same step
    assert sum(step.num_prefill_tokens for step in steps) == len(PROMPT) + 2 * again


def test_a_sample_depends_on_its_seed_and_index_alone(engine, alone):
    """Not on how many there are, on what runs beside them, or on what is cached."""
    params = {"temperature": 1.0, "max_tokens": 25, "seed": 11}
    wanted = alone(PROMPT, SamplingParams(n=5, **params))
    assert len(set(map(tuple, wanted))) == 5
    for n in (1, 3, 5):
        requests = [PROMPT[:40], PROMPT, PROMPT[:7]]
        mine = SamplingParams(n=n, **params)
        other = SamplingParams(n=2, seed=99, max_tokens=30)
        _, output, _ = engine.generate(requests, [other, mine, other], progress=False)
        assert [out.token_ids for out in output.outputs] == wanted[:n]
        assert [out.index for out in output.outputs] == list(range(n))


def test_samples_of_different_length_end_alone(engine, alone):
    params = SamplingParams(n=4, seed=5, max_tokens=40, stop_token_ids=[ord("r")])
    [output] = engine.generate(PROMPT, params, progress=False)
    assert len({len(out.token_ids) for out in output.outputs}) > 1
    assert [out.token_ids for out in output.outputs] == alone(PROMPT, params)


def test_greedy_samples_are_all_the_same(engine):
    params = SamplingParams(n=3, temperature=0, max_tokens=12)
    [output] = engine.generate(PROMPT, params, progress=False)
    assert len({tuple(out.token_ids) for out in output.outputs}) == 1


def test_best_of_returns_the_likeliest_best_first(engine):
    params = {"seed": 6, "max_tokens": 15, "ignore_eos": True}
    [every] = engine.generate(PROMPT, SamplingParams(n=6, logprobs=0, **params), progress=False)
    [best] = engine.generate(PROMPT, SamplingParams(n=2, best_of=6, **params), progress=False)

    def total(out):
        return sum(entry.sampled for entry in out.logprobs)

    ranked = sorted(every.outputs, key=total, reverse=True)
    assert [out.token_ids for out in best.outputs] == [out.token_ids for out in ranked[:2]]
    assert [out.index for out in best.outputs] == [0, 1]
    assert [out.text for out in best.outputs] == [out.text for out in ranked[:2]]
    for out, whole in zip(best.outputs, ranked, strict=False):
        assert out.cumulative_logprob == pytest.approx(total(whole))
        assert whole.cumulative_logprob == pytest.approx(total(whole))
        assert out.logprobs is None
    assert len(best.metrics.token_times_s) == 6, "of all that ran"


def test_best_of_n_is_an_order(engine):
    params = {"seed": 6, "max_tokens": 15, "n": 4}
    [plain] = engine.generate(PROMPT, SamplingParams(**params), progress=False)
    [same] = engine.generate(PROMPT, SamplingParams(best_of=4, **params), progress=False)
    assert [out.token_ids for out in same.outputs] == [out.token_ids for out in plain.outputs]
    assert plain.outputs[0].cumulative_logprob is None


def test_what_best_of_and_beams_cannot_do_is_refused(engine):
    for params in (SamplingParams(n=1, best_of=2), SamplingParams(beam_width=2)):
        with pytest.raises(ValueError, match="do not stream"):
            engine.add_request(None, PROMPT, params, stream=True)
    with pytest.raises(ValueError, match="best_of 2 is less than n 3"):
        SamplingParams(n=3, best_of=2)


def test_an_abort_ranks_what_never_ran_last(engine):
    params = SamplingParams(n=5, best_of=7, seed=6, max_tokens=15, ignore_eos=True)
    name = engine.add_request(None, PROMPT, params)
    for _ in range(8):
        engine.step()
    outputs = engine.abort(name).outputs
    assert [bool(out.token_ids) for out in outputs] == [True] * 4 + [False]
    sums = [out.cumulative_logprob for out in outputs[:4]]
    assert sums == sorted(sums, reverse=True)


def test_samples_are_streamed_side_by_side(engine, alone):
    params = SamplingParams(n=3, seed=8, max_tokens=10, ignore_eos=True)
    wanted, seen = alone(PROMPT, params), [[], [], []]
    for output in engine.stream(PROMPT, params):
        for tokens, out in zip(seen, output.outputs, strict=True):
            assert out.token_ids[: len(tokens)] == tokens
            tokens[:] = out.token_ids
    assert seen == wanted


def test_an_abort_gives_back_every_samples_blocks(engine):
    name = engine.add_request(None, PROMPT, SamplingParams(n=7, seed=9, max_tokens=30))
    for _ in range(8):
        engine.step()
    assert engine.core.scheduler.num_waiting == 3
    output = engine.abort(name)
    assert [bool(out.token_ids) for out in output.outputs] == [True] * 4 + [False] * 3
    assert num_used(engine) == 0
