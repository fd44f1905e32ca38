"""One bad request fails alone: bad numbers, bad text, bad callbacks, bad observers."""

from dataclasses import replace

import numpy as np
import pytest

from paged_jax import Engine, RequestOutput, SamplingParams
from paged_jax.loading import IncrementalDetokenizer, LoadedModel
from tests.conftest import SMALL_LIMITS, assert_idle
from tests.engine.mixed_requests import TEXT, essence

PROMPT = list(b"A function definition is an ")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OTHERS = {
    "greedy": (PROMPT, GREEDY),
    "samples": (list(TEXT[300:340].encode()), SamplingParams(n=2, seed=4, max_tokens=20)),
    "beams": (list(TEXT[400:420].encode()), SamplingParams(beam_width=2, max_tokens=10)),
    "streams": (list(TEXT[500:560].encode()), replace(GREEDY, stop="zzz")),
}
POISON = 7  # a token that the model never says by itself


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.core.scheduler.memory.check_invariants()
    assert_idle(engine)
    return outputs


def add_others(engine: Engine) -> None:
    for name, (prompt, params) in OTHERS.items():
        engine.add_request(name, prompt, params, stream=name == "streams")


def served_alone(engine: Engine) -> dict[str, list[tuple]]:
    add_others(engine)
    return {name: essence(output) for name, output in finish(engine).items()}


def poisoned_engine(model: LoadedModel, token: int, value: float) -> Engine:
    """Its model has no finite embedding for one token; the head, apart from it, is what it was."""
    weights = dict(model.weights)
    embedding = np.array(weights["embed.embedding"])
    weights["lm_head.kernel"] = embedding.T.copy()
    embedding[token] = value
    weights["embed.embedding"] = embedding
    config = replace(model.config, tie_word_embeddings=False)
    return Engine(LoadedModel(config, weights, model.tokenizer), **SMALL_LIMITS)


@pytest.fixture(scope="module")
def poisoned(tiny_model) -> Engine:
    return poisoned_engine(tiny_model, POISON, np.nan)


@pytest.fixture(scope="module")
def wanted(poisoned):
    return served_alone(poisoned)


BAD_PROMPT = [*TEXT[600:640].encode(), POISON, *TEXT[640:650].encode()]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, repetition_penalty=1.3, min_tokens=3),
        SamplingParams(n=3, seed=1, max_tokens=12),
        SamplingParams(beam_width=3, max_tokens=12),
        replace(GREEDY, logprobs=2, prompt_logprobs=0),
    ],
    ids=["greedy", "penalties", "samples", "beams", "logprobs"],
)
def test_a_prompt_whose_logits_are_not_finite_fails_alone(poisoned, wanted, params):
    add_others(poisoned)
    poisoned.add_request("bad", BAD_PROMPT, params)
    outputs = finish(poisoned)
    bad = outputs.pop("bad")
    assert bad.error == "the logits of its output token 0 are not finite"
    assert {(out.finish_reason, len(out.token_ids)) for out in bad.outputs} == {("error", 0)}
    assert {name: essence(output) for name, output in outputs.items()} == wanted


def test_what_a_failed_request_has_computed_is_not_found_by_others(poisoned):
    """Not even the 32 tokens before the bad one, which an earlier chunk has computed well."""
    start = BAD_PROMPT[:40]
    poisoned.add_request("bad", BAD_PROMPT, GREEDY)
    poisoned.step()
    assert poisoned.core.scheduler.num_running == 1, "there is more to compute"
    num_cached = poisoned.core.scheduler.memory.num_cached_blocks
    assert finish(poisoned)["bad"].error is not None
    assert poisoned.core.scheduler.memory.num_cached_blocks == num_cached
    [again] = poisoned.generate([start], GREEDY, progress=False)
    assert (again.num_cached_tokens, again.error) == (0, None)
    [again] = poisoned.generate([start], GREEDY, progress=False)
    assert again.num_cached_tokens == 32


def test_blocks_that_others_share_with_a_failed_request_stay_theirs(poisoned):
    good = BAD_PROMPT[:40]
    [alone] = poisoned.generate([good], replace(GREEDY, cache_salt="alone"), progress=False)
    shared = replace(GREEDY, cache_salt="shared")
    poisoned.add_request("good", good, replace(shared, max_tokens=12))
    for _ in range(3):
        poisoned.step()
    poisoned.add_request("bad", BAD_PROMPT, shared)
    outputs = finish(poisoned)
    assert outputs["bad"].num_cached_tokens == 32
    assert outputs["bad"].error is not None
    assert essence(outputs["good"]) == essence(alone)
    [again] = poisoned.generate([good], shared, progress=False)
    assert again.num_cached_tokens == 32, "what the good one has computed is there"
    assert essence(again) == essence(alone)


@pytest.mark.parametrize("n", [1, 2])
def test_logits_that_are_no_longer_finite_end_a_request_with_what_it_has(tiny_model, poisoned, n):
    """The model turns bad after a token that only this request comes to."""
    params = SamplingParams(n=n, seed=2, temperature=1.2, max_tokens=40, ignore_eos=True)
    prompt = list(TEXT[700:730].encode())
    [whole] = poisoned.generate([prompt], params, progress=False)
    [other] = poisoned.generate([PROMPT], GREEDY, progress=False)
    tokens = whole.outputs[-1].token_ids
    harmless = {*PROMPT, *other.outputs[0].token_ids, *prompt, *tokens[:4]}
    harmless |= {t for out in whole.outputs[:-1] for t in out.token_ids}
    bad = next(t for t in tokens[4:-1] if t not in harmless)
    at = tokens.index(bad)

    turning = poisoned_engine(tiny_model, bad, np.inf)
    turning.add_request("bad", prompt, params)
    turning.add_request("good", PROMPT, GREEDY)
    outputs = finish(turning)
    assert outputs["bad"].error == f"the logits of its output token {at + 1} are not finite"
    assert [out.token_ids for out in outputs["bad"].outputs] == [
        out.token_ids[: at + 1] for out in whole.outputs
    ]
    assert {out.finish_reason for out in outputs["bad"].outputs} == {"error"}
    assert [len(times) for times in outputs["bad"].metrics.token_times_s] == [at + 1] * n
    assert essence(outputs["good"]) == essence(other)


class BadText(ValueError):
    pass


@pytest.fixture(scope="module")
def unharmed(engine_with):
    return served_alone(engine_with())


@pytest.mark.parametrize("num_tokens", [1, 5, 12])
@pytest.mark.parametrize("stream", [False, True])
def test_a_detokenizer_that_raises_fails_its_request_alone(
    engine, unharmed, monkeypatch, num_tokens, stream
):
    """At its first token, in the middle, and at the token that ends it."""
    [whole] = engine.generate([PROMPT], GREEDY, progress=False)
    real = IncrementalDetokenizer.append
    engine.add_request("bad", PROMPT, replace(GREEDY, stop="zzz"), stream=stream)
    bad = engine._delivery._records["bad"].sequences[0].detokenizer
    calls = []

    def append(self, token_ids):
        if self is bad:
            calls.append(token_ids)
            if len(calls) == num_tokens:
                raise BadText("no\nsuch text")
        return real(self, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "append", append)
    add_others(engine)
    outputs = finish(engine)
    output = outputs.pop("bad")
    assert output.error == "its text could not be decoded: BadText: no such text"
    [out] = output.outputs
    assert (out.finish_reason, out.stop_reason) == ("error", None)
    assert out.token_ids == whole.outputs[0].token_ids[:num_tokens]
    assert out.text == whole.outputs[0].text[: num_tokens - 1]
    assert {name: essence(output) for name, output in outputs.items()} == unharmed


def test_a_stop_string_that_raises_fails_its_request_alone(engine, unharmed):
    class Stop(str):
        is_bad = False

        def __len__(self):
            if self.is_bad:
                raise BadText("length")
            return super().__len__()

    stop = Stop("zzz")
    engine.add_request("bad", PROMPT, replace(GREEDY, stop=stop))
    add_others(engine)
    engine.step()
    stop.is_bad = True
    outputs = finish(engine)
    output = outputs.pop("bad")
    assert output.error == "its text could not be decoded: BadText: length"
    assert output.outputs[0].finish_reason == "error"
    assert {name: essence(output) for name, output in outputs.items()} == unharmed


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(n=2, seed=1), SamplingParams(beam_width=2)], ids=str
)
def test_a_tokenizer_that_raises_at_the_end_fails_its_request_alone(engine, params):
    [other] = engine.generate([PROMPT], GREEDY, progress=False)
    params = replace(params, max_tokens=12)
    engine.add_request("bad", list(TEXT[800:830].encode()), params)
    tokens = [out.token_ids for out in finish(engine)["bad"].outputs]

    class Tokenizer:
        def decode(self, token_ids, **options):
            if list(token_ids) in tokens:
                raise BadText("token ids")
            return engine.tokenizer.decode(token_ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._delivery, "_tokenizer", Tokenizer())
        engine.add_request("bad", list(TEXT[800:830].encode()), params)
        engine.add_request("good", PROMPT, GREEDY)
        outputs = finish(engine)
    bad = outputs["bad"]
    assert bad.error == "its text could not be decoded: BadText: token ids"
    assert [out.token_ids for out in bad.outputs] == tokens
    assert {(out.finish_reason, out.text) for out in bad.outputs} == {("error", "")}
    assert essence(outputs["good"]) == essence(other)
