"""Sampling parameters: vLLM's defaults, values normalised, bad ones refused with their value."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling_params import SamplingParams
from paged_jax.structured_outputs import StructuredOutputsParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.min_tokens) == (1, 16, 0)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert params.seed is params.logprobs is None
    assert (params.stop, params.stop_token_ids) == ((), ())
    assert not params.is_greedy
    assert not params.has_penalties


def test_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-3).is_greedy


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.5}],
)
def test_penalties_are_noticed(penalty):
    assert SamplingParams(**penalty).has_penalties


def test_values_are_normalised():
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_p=1,
        seed=np.uint32(7),
        stop="END",
        stop_token_ids=[np.int32(3)],
    )
    assert (type(params.n), type(params.temperature), type(params.top_p)) == (int, float, float)
    assert (type(params.seed), type(params.stop_token_ids[0])) == (int, int)
    assert params.stop == params.stop_strings == ("END",)
    assert params.stop_token_ids == (3,)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_both_ways_to_turn_top_k_off_are_one():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_params_are_immutable_hashable_and_replaceable():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert hash(params) == hash(SamplingParams(stop=["a"], stop_token_ids=[1]))
    assert dataclasses.replace(params, n=3).n == 3
    with pytest.raises(ValueError, match="n must be"):
        dataclasses.replace(params, n=0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n must be between 1 and 16384, got 0"),
        ("n", 1.0, "n must be an integer, got 1.0"),
        ("n", True, "n must be an integer, got True"),
        ("temperature", -0.1, "temperature must be at least 0.0, got -0.1"),
        ("temperature", math.nan, "temperature must be finite, got nan"),
        ("temperature", math.inf, "temperature must be finite, got inf"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("temperature", None, "temperature must be a number, got None"),
        ("temperature", True, "temperature must be a number, got True"),
        ("top_k", -2, "top_k must be at least -1, got -2"),
        ("top_k", 1.5, "top_k must be an integer, got 1.5"),
        ("top_p", 0.0, "top_p must be above 0.0 and at most 1.0, got 0.0"),
        ("top_p", 1.1, "top_p must be above 0.0 and at most 1.0, got 1.1"),
        ("top_p", math.nan, "top_p must be finite, got nan"),
        ("min_p", -0.1, "min_p must be at least 0.0 and at most 1.0, got -0.1"),
        ("min_p", 1.5, "min_p must be at least 0.0 and at most 1.0, got 1.5"),
        ("repetition_penalty", 0.0, "repetition_penalty must be above 0.0, got 0.0"),
        ("repetition_penalty", -1, "repetition_penalty must be above 0.0, got -1"),
        ("presence_penalty", 2.1, "presence_penalty must be at least -2.0 and at most 2.0"),
        ("frequency_penalty", -2.1, "frequency_penalty must be at least -2.0 and at most 2.0"),
        ("seed", -1, "seed must be at least 0, got -1"),
        ("seed", 0.5, "seed must be an integer, got 0.5"),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("min_tokens", -1, "min_tokens must be at least 0, got -1"),
        ("min_tokens", 17, "min_tokens 17 is greater than max_tokens 16"),
        ("stop", 5, "stop must be a string or a sequence of strings, got 5"),
        ("stop", ["a", 5], "stop must hold strings, got 5"),
        ("stop", "", "stop must not hold an empty string, got ''"),
        ("stop_token_ids", 5, "stop_token_ids must be a sequence of token ids, got 5"),
        ("stop_token_ids", "5", "stop_token_ids must be a sequence of token ids, got '5'"),
        ("stop_token_ids", [1, -5], "stop_token_ids must hold token ids of at least 0, got -5"),
        ("stop_token_ids", [1.5], "stop_token_ids must hold token ids of at least 0, got 1.5"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("skip_special_tokens", None, "skip_special_tokens must be True or False, got None"),
        ("logprobs", -1, "logprobs must be between 0 and 20, got -1"),
        ("logprobs", 21, "logprobs must be between 0 and 20, got 21"),
    ],
)
def test_bad_values_are_refused(name, value, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message is compared)
        SamplingParams(**{name: value})
    assert message in str(error.value)


def test_sequences_that_run_are_as_many_as_compete():
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(n=2, beam_width=4).num_sequences == 4


def test_ranking_needs_log_probabilities_that_the_caller_did_not_ask_for():
    assert not SamplingParams(n=2, best_of=2).wants_candidates
    assert SamplingParams(best_of=2).wants_candidates
    assert SamplingParams(beam_width=1).wants_candidates
    assert SamplingParams(logprobs=0).wants_candidates


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 1, "n": 2}, "best_of 1 is less than n 2"),
        ({"best_of": 0}, "best_of must be between 1"),
        ({"beam_width": 0}, "beam_width must be between 1"),
        ({"beam_width": 2, "n": 3}, "n 3 is greater than beam_width 2"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature 0.7 does not go with beam_width 2"),
        ({"beam_width": 2, "stop": "x"}, "stop .* does not go with beam_width"),
        ({"beam_width": 2, "best_of": 2}, "best_of 2 does not go with beam_width"),
        ({"length_penalty": 2.0}, "length_penalty 2.0 needs a beam_width"),
        ({"early_stopping": True}, "early_stopping True needs a beam_width"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping must be True, False.*got 1"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping must be True, False"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty must be finite"),
        ({"cache_salt": 3}, "cache_salt must be a string, got 3"),
    ],
)
def test_bad_choices_of_sharing_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("name", "given", "plain"),
    [
        ("stop", None, ()),
        ("stop", {"b", "a"}, ("a", "b")),
        ("stop", (text for text in "ab"), ("a", "b")),
        ("stop", np.array(["a", "b"]), ("a", "b")),
        ("stop", np.str_("a"), ("a",)),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", {7}, (7,)),
        ("stop_token_ids", range(2), (0, 1)),
        ("stop_token_ids", np.array([3, 4], np.uint8), (3, 4)),
        ("stop_token_ids", jnp.array([3, 4]), (3, 4)),
        ("stop_token_ids", [jnp.int32(3), np.int64(4)], (3, 4)),
        ("allowed_token_ids", np.array([5]), (5,)),
        ("bad_words", "no", ("no",)),
        ("bad_words", None, ()),
        ("logits_processors", ["a", "b"], ("a", "b")),
        ("logits_processors", None, ()),
        ("ignore_eos", np.True_, True),
        ("skip_special_tokens", jnp.array(False), False),
        ("early_stopping", np.False_, False),
        ("n", jnp.int32(3), 3),
        ("seed", np.array(5), 5),
        ("max_tokens", None, None),
        ("temperature", jnp.float32(0.5), 0.5),
        ("top_p", np.float16(0.5), 0.5),
        ("cache_salt", np.str_("a"), "a"),
        ("truncate_prompt_tokens", -1, -1),
        ("logit_bias", {"7": 1, 5: np.float32(-100)}, ((5, -100.0), (7, 1.0))),
        ("logit_bias", {np.int64(7): jnp.float32(1)}, ((7, 1.0),)),
        ("logit_bias", {}, None),
        ("structured_outputs", {"regex": "a+"}, StructuredOutputsParams(regex="a+")),
        ("structured_outputs", {"choice": {"b", "a"}}, StructuredOutputsParams(choice=["a", "b"])),
    ],
)
def test_every_usual_form_of_a_value_is_taken_and_read_back_plain(name, given, plain):
    params = SamplingParams(**{name: given})
    value = getattr(params, name)
    assert value == plain
    assert type(value) is type(plain)
    assert hash(params) == hash(SamplingParams(**{name: plain}))
    assert dataclasses.replace(params) == params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": b"a"}, "stop must be a string or a sequence of strings, got b'a'"),
        ({"stop": {"a": 1}}, "stop must be a string or a sequence of strings, got {'a': 1}"),
        ({"stop": np.array([1])}, "stop must hold strings, got 1"),
        ({"stop_token_ids": np.array([1.0])}, "stop_token_ids must hold token ids .* got 1.0"),
        ({"stop_token_ids": np.array([[1]])}, r"stop_token_ids must hold token ids .* got \[1\]"),
        ({"stop_token_ids": np.int32(3)}, "stop_token_ids must be a sequence of token ids, got 3"),
        ({"n": np.array([1])}, r"n must be an integer, got \[1\]"),
        ({"n": np.True_}, "n must be an integer, got True"),
        ({"n": None}, "n must be an integer, got None"),
        ({"temperature": 10**400}, "temperature must be finite, got 1000"),
        ({"temperature": 1j}, "temperature must be a number, got 1j"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1, got 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be at least -1, got -2"),
        ({"logit_bias": [1, 2]}, r"logit_bias must map token ids to numbers, got \[1, 2\]"),
        ({"logit_bias": {"the": 1}}, "logit_bias must map token ids to numbers, got {'the': 1}"),
        ({"logit_bias": {-1: 1}}, "logit_bias must hold token ids of at least 0, got -1"),
        ({"logit_bias": {1.5: 1}}, "logit_bias must hold token ids of at least 0, got 1.5"),
        ({"logit_bias": {1: 101}}, "logit_bias of 1 must be at least -100.0 and at most 100.0"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of 1 must be finite, got nan"),
        ({"logit_bias": {1: "2"}}, "logit_bias of 1 must be a number, got '2'"),
        ({"logit_bias": {1: 2, "1": 3}}, "logit_bias must name each token once"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "at most 300 tokens, got 301"),
        ({"allowed_token_ids": []}, "allowed_token_ids must hold a token, or be None"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids must hold token ids .* got '1'"),
        ({"bad_words": ["a", ""]}, "bad_words must not hold an empty string"),
        ({"logits_processors": [max]}, "logits_processors must hold strings, got <built-in"),
        ({"structured_outputs": "a+"}, "structured_outputs must be StructuredOutputsParams or a d"),
        ({"structured_outputs": {}}, "structured_outputs takes one of json, .*; got none"),
        ({"structured_outputs": {"jsn": {}}}, "unknown key of structured_outputs 'jsn'; .*'json'"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "got regex and choice"),
        ({"structured_outputs": {"regex": 5}}, "regex must be a string, got 5"),
        ({"structured_outputs": {"json": "{"}}, "json must be a JSON schema.*: Expecting prop"),
        ({"structured_outputs": {"json": 5}}, "json must be a JSON schema.* got 5"),
        ({"structured_outputs": {"json": "[]"}}, "json must be a JSON schema, .*object; got"),
        ({"structured_outputs": {"json": {"a": {1}}}}, "json must be a JSON schema.*serializable"),
        ({"structured_outputs": {"choice": [1]}}, "choice must hold strings, got 1"),
    ],
    ids=str,
)
def test_a_form_that_does_not_fit_is_refused_with_the_right_one(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        SamplingParams(**fields)
    assert "\n" not in str(error.value)


def test_params_may_be_a_dict_of_their_fields():
    params = SamplingParams(temperature=0, stop="x")
    assert SamplingParams.of({"temperature": 0, "stop": ["x"]}) == params
    assert SamplingParams.of(params) is params
    assert SamplingParams.of(None) == SamplingParams.of({}) == SamplingParams()
    message = "unknown key of params 'temprature'; did you mean 'temperature'?"
    with pytest.raises(ValueError, match=message):
        SamplingParams.of({"temprature": 0})
    with pytest.raises(ValueError, match="unknown key of params 7; one of n, best_of"):
        SamplingParams.of({7: 0})
    with pytest.raises(
        ValueError, match=r"params must be SamplingParams or a dict .* got 'greedy'"
    ):
        SamplingParams.of("greedy")


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {1: 1}},
        {"logits_processors": "a"},
        {"allowed_token_ids": [1]},
        {"bad_words": "no"},
        {"structured_outputs": {"regex": "a"}},
    ],
    ids=str,
)
def test_beams_take_nothing_that_changes_their_scores(fields):
    [name] = fields
    with pytest.raises(ValueError, match=f"{name} .* does not go with beam_width 2"):
        SamplingParams(beam_width=2, **fields)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"json": {"type": "object"}}, '{"type": "object"}'),
        ({"json": '{"type":"object"}'}, '{"type":"object"}'),
        ({"regex": "", "json_object": None}, ""),
        ({"json_object": np.True_}, True),
    ],
)
def test_what_a_text_must_match_is_one_form_of_several(form, text):
    params = StructuredOutputsParams(**form)
    assert getattr(params, next(iter(form))) == text
