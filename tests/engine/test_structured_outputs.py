"""Texts match what was asked for, the same however they are served."""

import json
import re
from dataclasses import replace

import pytest
from llguidance import LLParserLimits

from paged_jax import SamplingParams
from paged_jax.constraints import grammar
from paged_jax.executor.compilation import count_compilations
from tests.engine.mixed_requests import TEXT, essence, serve

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
        "tags": {"type": "array", "items": {"enum": ["é", "😀", 'a"b']}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # a model this small may write nothing else
}
DATE = r"[12][0-9]{3}-(0[1-9]|1[0-2])-[0-3][0-9]( [a-zà]{2,9}){1,3}\."
CHOICES = ("the function", "the class", "an exception — or none")
EMAIL = 'start: NAME "@" NAME ("." NAME)+\nNAME: /[a-z]{1,8}/'
SENTENCE = r"[A-Z][a-z ]{5,60}\."


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 199
    return {*person["tags"]} <= {"é", "😀", 'a"b'}


def matches(regex: str):
    return lambda text: re.fullmatch(regex, text)


GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.0, "seed": 5}
NAMES = r"[a-z]{1,8}@[a-z]{1,8}(\.[a-z]{1,8})+"
# What is asked for, and whether a text is that; all of them end before max_tokens.
FORMS = [
    ({"structured_outputs": {"json": PERSON}}, is_person),
    ({"structured_outputs": {"regex": DATE}}, matches(DATE)),
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    ({"structured_outputs": {"grammar": EMAIL}, "logit_bias": {ord("."): -3}}, matches(NAMES)),
    (
        {"structured_outputs": {"regex": SENTENCE}, "bad_words": ["the", "a"], "n": 3},
        lambda text: matches(SENTENCE)(text) and "the" not in text and "a" not in text,
    ),
    (
        {"structured_outputs": {"regex": "[a-z ]{5,60}"}, "min_tokens": 40},
        matches("[a-z ]{40,60}"),
    ),
    (
        {"structured_outputs": {"json": PERSON}, "logprobs": 2, "best_of": 3},
        is_person,
    ),
    (
        {"allowed_token_ids": [*b"aeiou ", 257], "stop": "uu"},
        lambda text: set(text) <= set("aeiou "),
    ),
    ({"bad_words": ["e", "th"]}, lambda text: "e" not in text and "th" not in text),
]
PLAIN = [{}, {"stop": "the "}, {"repetition_penalty": 1.3}, {"n": 2}]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Each form greedily and by a seed, between requests without any."""
    found = []
    for i, (form, _) in enumerate(FORMS):
        for j, sampling in enumerate((GREEDY, SEEDED)):
            prompt = list(TEXT[150 * i :][: 20 + 17 * i].encode())
            found.append((prompt, SamplingParams(**form, **sampling, max_tokens=120)))
            plain = PLAIN[(i + j) % len(PLAIN)]
            found.append((prompt[::-1], SamplingParams(**plain, **sampling, max_tokens=9)))
    return found


@pytest.fixture(scope="module")
def wanted(engine_with):
    return serve(engine_with(), requests())


def test_texts_match_what_was_asked_for(wanted):
    of_forms = wanted[::2]
    for (form, is_right), outputs in zip(
        [form for form in FORMS for _ in range(2)], of_forms, strict=True
    ):
        for _, tokens, text, reason, stop_reason in outputs:
            assert is_right(text), (form, text)
            if "structured_outputs" in form:
                assert (reason, stop_reason, tokens[-1]) == ("stop", None, 257), form
                assert text.encode() == bytes(tokens[:-1])


def test_texts_are_the_same_alone(engine, wanted):
    assert [serve(engine, [request])[0] for request in requests()] == wanted


@pytest.mark.parametrize(
    "limits",
    [
        {"pipelined": True},
        {"block_size": 4, "num_blocks": 96},
        {"block_size": 4, "num_blocks": 96, "pipelined": True},
        {"block_size": 4, "num_blocks": 96, "preemption_mode": "swap", "swap_space_blocks": 200},
        {"max_num_batched_tokens": 5},
        {"memory_policy": "orca_oracle", "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_texts_are_the_same_however_they_are_served(engine_with, wanted, limits):
    engine = engine_with(**limits)
    counters = engine.core.scheduler.counters
    before = counters.num_preemptions, counters.num_preemptions_by_swap
    assert serve(engine, requests()) == wanted
    if "num_blocks" in limits:
        assert counters.num_preemptions > before[0]
    if "swap_space_blocks" in limits:
        assert counters.num_preemptions_by_swap > before[1]


def test_nothing_is_compiled_for_a_constraint(engine, wanted):
    again = [(prompt, replace(params, cache_salt="again")) for prompt, params in requests()]
    with count_compilations() as count:
        assert serve(engine, again) == wanted
    assert count.programs == 0


def test_a_stream_shows_what_is_returned(engine):
    params = {"structured_outputs": {"json": PERSON}, "temperature": 0.8, "seed": 3}
    [whole] = engine.generate(TEXT[:40], {**params, "max_tokens": 100}, progress=False)
    *parts, last = engine.stream(TEXT[:40], {**params, "max_tokens": 100})
    assert essence(last) == essence(whole)
    assert is_person(last.outputs[0].text)
    texts = [part.outputs[0].text for part in parts]
    assert all(last.outputs[0].text.startswith(text) for text in texts)


def test_stop_strings_stop_tokens_and_max_tokens_cut_a_text_that_has_to_match(engine):
    def text(**params):
        form = {"structured_outputs": {"regex": "(ab){1,20}c"}, "temperature": 0}
        bias = {"logit_bias": {ord("a"): 50.0}}  # so that it goes on
        [output] = engine.generate("x", {**form, **bias, **params}, progress=False)
        [out] = output.outputs
        return out.text, out.finish_reason, out.stop_reason

    assert text(max_tokens=99) == ("ab" * 20 + "c", "stop", None)
    assert text(max_tokens=5) == ("ababa", "length", None)
    assert text(stop="bab") == ("a", "stop", "bab")
    assert text(stop="bab", include_stop_str_in_output=True) == ("abab", "stop", "bab")
    assert text(stop_token_ids=[ord("b")]) == ("a", "stop", ord("b"))
    assert text(stop_token_ids=[ord("z")], ignore_eos=True, max_tokens=99) == (
        "ab" * 20 + "c",
        "stop",
        ord("z"),
    )


def test_a_request_that_is_left_without_a_token_ends_alone_with_the_reason(engine):
    """Its text is complete before min_tokens; the others go on."""
    short = SamplingParams(structured_outputs={"regex": "abc"}, min_tokens=5)
    nothing = SamplingParams(structured_outputs={"regex": "abc"}, allowed_token_ids=[97])
    plain = SamplingParams(temperature=0, max_tokens=8)
    first, second, third = engine.generate([TEXT[:20]] * 3, [short, nothing, plain], progress=False)
    assert first.outputs[0].text == "abc"
    assert first.finish_reason == second.finish_reason == "error"
    assert "leave no token to be output token 3" in first.error
    assert second.outputs[0].text == "a"
    assert "leave no token to be output token 1" in second.error
    [alone] = engine.generate(TEXT[:20], plain, progress=False)
    assert essence(third) == essence(alone)


def test_what_llguidance_gives_up_ends_its_request_alone(engine, monkeypatch):
    monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(step_lexer_fuel=5, verbose_errors=False))
    hard = {"structured_outputs": {"regex": "(?s:.*)a(?s:.{100})b"}, "max_tokens": 100}
    plain = SamplingParams(temperature=0, max_tokens=8)
    first, second = engine.generate([TEXT[:20]] * 2, [hard, plain], progress=False)
    [alone] = engine.generate(TEXT[:20], plain, progress=False)
    assert essence(second) == essence(alone)
    assert (first.finish_reason, first.error.count("\n")) == ("error", 0)
    assert "structured_outputs: lexer error" in first.error
