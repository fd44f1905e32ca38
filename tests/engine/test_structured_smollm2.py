"""Structured outputs of a model that has words for tokens."""

import json
import re

import pytest

from paged_jax import Engine, SamplingParams
from tests.engine.mixed_requests import essence

pytestmark = pytest.mark.slow

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Japan"]},
        "population": {"type": "integer", "minimum": 1000, "maximum": 20_000_000},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PHONE = r"\+[0-9]{2} [0-9]{3}( [0-9]{2}){2}"
CHOICES = ["a city", "a river", "a mountain"]
QUESTION = [{"role": "user", "content": "Tell me about Paris."}]
SEEDED = {"temperature": 0.8, "seed": 1}
REQUESTS = [
    SamplingParams(**params, max_tokens=64)
    for params in (
        {"structured_outputs": {"json": CITY}, "temperature": 0},
        {"structured_outputs": {"json": CITY}, "n": 2, **SEEDED},
        {"structured_outputs": {"regex": PHONE}, "temperature": 0},
        {"structured_outputs": {"regex": PHONE}, **SEEDED},
        {"structured_outputs": {"choice": CHOICES}, **SEEDED},
        {"bad_words": ["Paris", "city", "capital"], "temperature": 0},
        {"temperature": 0},
    )
]


@pytest.fixture(scope="module")
def engine_of():
    limits = {"max_num_seqs": 4, "max_prefill_seqs": 4, "max_model_len": 128, "warm_up": False}
    return lambda **own: Engine("smollm2", **limits, **own)


@pytest.fixture(scope="module")
def plain(engine_of):
    return engine_of().chat([QUESTION] * len(REQUESTS), REQUESTS, progress=False)


def test_texts_match_what_was_asked_for(plain):
    for params, output in zip(REQUESTS, plain, strict=True):
        form = params.structured_outputs
        for out in output.outputs:
            if form is None:
                assert not any(word in out.text for word in params.bad_words)
                continue
            assert out.finish_reason == "stop"
            if form.json is not None:
                city = json.loads(out.text)
                assert list(city) == CITY["required"]
                assert city["country"] in CITY["properties"]["country"]["enum"]
                assert city["population"] >= 1000
            elif form.regex is not None:
                assert re.fullmatch(form.regex, out.text)
            else:
                assert out.text in form.choice


def test_texts_are_the_same_preempted_pipelined_and_in_chunks(engine_of, plain):
    engine = engine_of(num_blocks=9, pipelined=True, max_num_batched_tokens=16)
    outputs = engine.chat([QUESTION] * len(REQUESTS), REQUESTS, progress=False)
    assert engine.core.scheduler.counters.num_preemptions > 0
    assert list(map(essence, outputs)) == list(map(essence, plain))
