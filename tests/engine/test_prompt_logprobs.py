"""Log-probabilities of the prompt's own tokens: those of a plain forward pass, however served."""

import numpy as np
import pytest

from paged_jax import SamplingParams
from tests.engine.dense_model import dense_logits
from tests.engine.mixed_requests import BOS, TEXT

TOLERANCE = 2e-4
SCORED = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=3, ignore_eos=True)
# One that fills a block of 16, some that need several chunks and several calls to be scored.
LENGTHS = (1, 2, 16, 50, 130)


def prompt_of(length: int) -> list[int]:
    return [BOS, *TEXT[300:].encode()[: length - 1]]


@pytest.fixture(scope="module")
def logprobs_after(tiny_model):
    """Tokens -> log-probabilities after each of them, in float64."""
    logits = dense_logits(tiny_model)

    def logprobs(tokens):
        rows = logits(tokens).astype(np.float64)
        rows -= rows.max(axis=-1, keepdims=True)
        return rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))

    return logprobs


def assert_scores(output, logprobs_after, num_top=3) -> None:
    """The request has the scores of its prompt and no others."""
    prompt = list(output.prompt_token_ids)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    wanted = logprobs_after(prompt)
    for at, entry in enumerate(output.prompt_logprobs[1:], start=1):
        row = wanted[at - 1]
        assert entry.sampled == pytest.approx(row[prompt[at]], abs=TOLERANCE)
        assert [logprob for _, logprob in entry.top] == pytest.approx(
            np.sort(row)[::-1][:num_top], abs=TOLERANCE
        )
        for token, logprob in entry.top:
            assert logprob == pytest.approx(row[token], abs=TOLERANCE)


def same_scores(first, second) -> bool:
    """Equal but for the rounding of other chunks."""

    def flat(output):
        return [
            x for entry in output.prompt_logprobs[1:] for x in (entry.sampled, *dict(entry.top))
        ]

    return flat(first) == pytest.approx(flat(second), abs=TOLERANCE)


def test_they_are_those_of_a_forward_pass_whatever_the_length(engine, logprobs_after):
    prompts = [prompt_of(length) for length in LENGTHS]
    together = engine.generate(prompts, SCORED, progress=False)
    for output, prompt in zip(together, prompts, strict=True):
        assert_scores(output, logprobs_after)
        [alone] = engine.generate(prompt, SCORED, progress=False)
        assert same_scores(alone, output)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_only_who_asks_gets_them_and_as_many_as_asked(engine, logprobs_after):
    prompt = prompt_of(40)
    params = [
        SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0),
        SamplingParams(temperature=0, max_tokens=2),
        SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=20, logprobs=1),
    ]
    none, silent, many = engine.generate([prompt] * 3, params, progress=False)
    assert_scores(none, logprobs_after, num_top=0)
    assert silent.prompt_logprobs is None
    assert_scores(many, logprobs_after, num_top=20)
    assert none.outputs[0].logprobs is None
    assert len(many.outputs[0].logprobs[0].top) == 1


def test_a_cached_prompt_is_computed_for_them_and_serves_others_after(engine, logprobs_after):
    prompt = prompt_of(70)
    engine.generate(prompt, SamplingParams(max_tokens=1, cache_salt="scored"), progress=False)
    asks = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=3, cache_salt="scored")
    [scored] = engine.generate(prompt, asks, progress=False)
    assert scored.num_cached_tokens == 0
    assert_scores(scored, logprobs_after)
    fresh = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=3, cache_salt="fresh")
    engine.generate(prompt, fresh, progress=False)
    plain = SamplingParams(temperature=0, max_tokens=6, cache_salt="fresh")
    [after] = engine.generate(prompt, plain, progress=False)
    assert after.num_cached_tokens == 64
    assert after.outputs[0].token_ids == scored.outputs[0].token_ids


@pytest.mark.parametrize("caching", [True, False])
def test_preemptions_lose_and_repeat_none(engine_with, logprobs_after, caching):
    """The pool holds the prompts, but not their outputs."""
    engine = engine_with(block_size=4, num_blocks=96, enable_prefix_caching=caching)
    params = SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=3, ignore_eos=True)
    prompts = [[65 + i, *prompt_of(90)] for i in range(4)]
    outputs = engine.generate(prompts, params, progress=False)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output in outputs:
        assert_scores(output, logprobs_after)


def test_samples_and_beams_have_them_once(engine, logprobs_after):
    prompt = prompt_of(45)
    params = [
        SamplingParams(n=6, seed=1, max_tokens=4, prompt_logprobs=3),  # more than run at a time
        SamplingParams(beam_width=3, n=2, max_tokens=4, prompt_logprobs=3),
    ]
    outputs = engine.generate([prompt] * 2, params, progress=False)
    for output in outputs:
        assert_scores(output, logprobs_after)
    [plain] = engine.generate(prompt, SamplingParams(n=6, seed=1, max_tokens=4), progress=False)
    assert [out.token_ids for out in plain.outputs] == [out.token_ids for out in outputs[0].outputs]


def test_a_request_that_ends_in_mid_prompt_has_what_there_is(engine, logprobs_after):
    name = engine.add_request(None, prompt_of(100), SCORED)
    engine.step()
    engine.step()
    output = engine.abort(name)
    assert len(output.prompt_logprobs) == 1 + 64
    wanted = logprobs_after(list(output.prompt_token_ids))
    last = output.prompt_logprobs[-1]
    assert last.sampled == pytest.approx(wanted[63][output.prompt_token_ids[64]], abs=TOLERANCE)


def test_bad_counts_are_refused():
    with pytest.raises(ValueError, match="prompt_logprobs must be between 0 and 20, got 21"):
        SamplingParams(prompt_logprobs=21)
    with pytest.raises(ValueError, match="prompt_logprobs must be an integer, got True"):
        SamplingParams(prompt_logprobs=True)


def test_a_stream_has_them_from_the_first_token_on(engine, logprobs_after):
    first, *_ = engine.stream(prompt_of(20), SCORED)
    assert_scores(first, logprobs_after)


def test_chunks_of_a_few_tokens(engine_with, logprobs_after):
    engine = engine_with(max_num_batched_tokens=5)
    [output] = engine.generate(prompt_of(30), SCORED, progress=False)
    assert_scores(output, logprobs_after)
