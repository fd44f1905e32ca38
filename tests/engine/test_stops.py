"""How a sequence ends, and what its text and log-probabilities then hold."""

import numpy as np
import pytest

from paged_jax import SamplingParams
from paged_jax.engine.records import SequenceRecord
from paged_jax.observability.observer import Observer
from paged_jax.scheduling.request import Request

PROMPT = "A function definition is an "
EOS = 257


def complete(engine, prompt=PROMPT, **params):
    """The one continuation, greedy."""
    [output] = engine.generate(
        prompt, SamplingParams(**{"temperature": 0, "max_tokens": 40} | params), progress=False
    )
    return output.outputs[0]


@pytest.fixture(scope="module")
def plain(engine_with):
    """The greedy continuation: 40 letters with several words."""
    out = complete(engine_with())
    assert (out.finish_reason, len(out.token_ids)) == ("length", 40)
    assert out.text.isascii()
    assert len(set(out.text.split())) >= 4
    return out.text


def test_max_tokens_is_exact(engine, plain):
    for max_tokens in (1, 2, 17):
        out = complete(engine, max_tokens=max_tokens)
        assert (out.text, out.finish_reason) == (plain[:max_tokens], "length")
        assert len(out.token_ids) == max_tokens


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_cuts_the_text_where_it_first_ends(engine, plain, length):
    """A token is a byte here, so longer stop strings cross token borders."""
    stop = plain[12 : 12 + length]
    at = plain.index(stop)
    out = complete(engine, stop=stop)
    assert out.text == plain[:at]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert len(out.token_ids) == at + length, "nothing is generated after it"


def test_a_stop_string_is_kept_if_wished(engine, plain):
    stop = plain[10:14]
    out = complete(engine, stop=stop, include_stop_str_in_output=True)
    assert out.text == plain[: plain.index(stop) + 4]
    assert out.stop_reason == stop


def test_the_first_of_several_stop_strings_wins(engine, plain):
    late, early = plain[25:28], plain[8:12]
    out = complete(engine, stop=["never there", late, early])
    assert (out.text, out.stop_reason) == (plain[: plain.index(early)], early)


def test_of_stop_strings_that_end_together_the_longest_is_cut(engine, plain):
    assert plain.index(plain[9:12]) == 9
    out = complete(engine, stop=[plain[10:12], plain[9:12], plain[11:12] + "never"])
    assert (out.text, out.stop_reason) == (plain[:9], plain[9:12])


def test_nothing_follows_a_stop_string_not_even_the_rest_of_its_token():
    """Here tokens are words, and the detokenizer holds back half a character."""

    class Detokenizer:
        def append(self, tokens):
            return {1: "one ", 2: "two STOP three"}[tokens[0]]

        def flush(self):
            return "\ufffd"

    params = SamplingParams(stop="STOP")
    record = SequenceRecord(Request("r", (1,), params, 0.0, 0).sequences[0], Detokenizer())
    assert record.append(1, 0.0, None) is None
    assert record.append(2, 0.0, None) == "STOP"
    record.finish(tokenizer=None)
    assert record.text == "one two "


def test_a_stop_string_that_the_prompt_holds_does_not_count(engine, plain):
    stop = "function definition"
    assert stop in PROMPT
    assert stop not in plain
    assert complete(engine, stop=stop).text == plain


def test_a_stop_string_across_prompt_and_output_does_not_count(engine, plain):
    assert complete(engine, stop=PROMPT[-3:] + plain[:2], max_tokens=10).text == plain[:10]


def test_a_stop_string_completed_by_the_last_token_is_a_stop(engine, plain):
    stop = plain[8:12]
    assert plain.index(stop) == 8
    out = complete(engine, stop=stop, max_tokens=12)
    assert (out.text, out.finish_reason, out.stop_reason) == (plain[:8], "stop", stop)


def test_the_scheduler_ends_a_sequence_at_its_stop_string(engine, plain, monkeypatch):
    """The text is read before the scheduler has the token, so nobody ends the sequence later."""
    seen = []

    class Ends(Observer):
        def on_step(self, iteration):
            seen.extend((s.finish_reason, s.stop_reason) for s in iteration.finished)

    monkeypatch.setattr(engine.core, "observers", [*engine.core.observers, Ends()])
    complete(engine, stop=plain[8:12], max_tokens=12)
    complete(engine, stop=plain[8:12])
    assert seen == [("stop", plain[8:12])] * 2


def test_stop_strings_wait_for_min_tokens(engine, plain):
    letter = plain[3]
    for min_tokens in (0, 10, 20):
        out = complete(engine, stop=letter, min_tokens=min_tokens)
        # At min_tokens tokens or later, and ends there.
        at = plain.index(letter, max(min_tokens - 1, 0))
        assert out.text == plain[:at]
        assert len(out.token_ids) == at + 1 >= min_tokens


def test_a_stop_token_ends_the_sequence_and_is_reported(engine, plain):
    token = ord(plain[6])
    out = complete(engine, stop_token_ids=[token])
    assert (out.finish_reason, out.stop_reason) == ("stop", token)
    at = plain.index(plain[6])
    assert out.token_ids == list(plain[: at + 1].encode())
    assert out.text == plain[:at]
    shown = complete(engine, stop_token_ids=[token], include_stop_str_in_output=True)
    assert shown.text == plain[: at + 1]
    streamed = list(engine.stream(PROMPT, SamplingParams(temperature=0, stop_token_ids=[token])))
    assert streamed[-1].outputs[0].text == plain[:at]


def test_stop_tokens_are_not_sampled_before_min_tokens(engine, plain):
    """They are masked, so the text changes rather than end."""
    tokens = [ord(plain[0]), ord(plain[1])]
    out = complete(engine, stop_token_ids=tokens, min_tokens=12)
    assert not set(out.token_ids[:12]) & set(tokens)
    assert len(out.token_ids) > 12 or out.finish_reason == "length"
    assert out.token_ids[-1] in tokens or out.finish_reason == "length"


@pytest.fixture(scope="module")
def ending(engine_with):
    """Sampling under which the model says EOS of its own, and the number of tokens till then."""
    variants = [{"temperature": 1.0, "seed": seed, "max_tokens": 60} for seed in range(32)]
    outputs = engine_with().generate(
        [PROMPT] * 32, [SamplingParams(**params) for params in variants], progress=False
    )
    for params, output in zip(variants, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        if tokens[-1] == EOS and 5 < len(tokens) < 55:
            return params, len(tokens)
    raise AssertionError("no seed ends")


def test_eos_ends_a_sequence_and_is_not_in_its_text(engine, ending):
    params, length = ending
    out = complete(engine, **params)
    assert (out.finish_reason, out.stop_reason) == ("stop", None)
    assert out.token_ids.index(EOS) == len(out.token_ids) - 1 == length - 1
    assert "eos" not in out.text
    shown = complete(engine, **params, skip_special_tokens=False)
    assert shown.text == out.text + "<|eos|>"


def test_ignore_eos_goes_on_to_max_tokens(engine, ending):
    params, length = ending
    out = complete(engine, **params, ignore_eos=True)
    assert (len(out.token_ids), out.finish_reason) == (60, "length")
    assert out.token_ids[:length] == complete(engine, **params).token_ids


def test_eos_is_not_sampled_before_min_tokens(engine, ending):
    params, length = ending
    ended = complete(engine, **params)
    out = complete(engine, **params, min_tokens=length + 1)
    assert len(out.token_ids) > length
    assert EOS not in out.token_ids[:length]
    assert out.token_ids[: length - 1] == ended.token_ids[:-1], "the draws before are the same"


def test_min_tokens_that_are_reached_change_nothing(engine, ending):
    params, length = ending
    out = complete(engine, **params, min_tokens=length - 1)
    assert out.token_ids == complete(engine, **params).token_ids


def test_logprobs_are_those_of_each_token_and_the_most_likely(engine, plain):
    out = complete(engine, logprobs=3, max_tokens=10)
    assert out.text == plain[:10]
    assert len(out.logprobs) == 10
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert len(entry.top) == 3
        assert entry.top[0] == (token, entry.sampled), "greedy takes the most likely"
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert 0 < np.exp(values).sum() <= 1 + 1e-5


def test_logprobs_come_only_where_asked_for(engine):
    params = [
        SamplingParams(temperature=0, max_tokens=4, logprobs=logprobs) for logprobs in (None, 0, 20)
    ]
    none, own, most = (
        out.outputs[0] for out in engine.generate([PROMPT] * 3, params, progress=False)
    )
    assert none.logprobs is None
    assert [entry.top for entry in own.logprobs] == [()] * 4
    assert [len(entry.top) for entry in most.logprobs] == [20] * 4
    np.testing.assert_allclose(
        [entry.sampled for entry in own.logprobs],
        [entry.sampled for entry in most.logprobs],
        rtol=1e-4,
    )


def test_n_continuations_differ_and_come_in_order(engine):
    params = SamplingParams(n=5, seed=3, max_tokens=20, temperature=1.0)
    [first] = engine.generate(PROMPT, params, progress=False)
    assert [out.index for out in first.outputs] == [0, 1, 2, 3, 4]
    assert len({out.text for out in first.outputs}) == 5
    [again] = engine.generate(PROMPT, params, progress=False)
    assert [out.text for out in again.outputs] == [out.text for out in first.outputs]
    alone = SamplingParams(seed=3, max_tokens=20, temperature=1.0)
    [single] = engine.generate(PROMPT, alone, progress=False)
    assert single.outputs[0].text == first.outputs[0].text


def test_greedy_continuations_of_one_request_are_the_same(engine, plain):
    [output] = engine.generate(
        PROMPT, SamplingParams(n=3, temperature=0, max_tokens=9), progress=False
    )
    assert [out.text for out in output.outputs] == [plain[:9]] * 3


def test_text_of_broken_characters_is_that_of_the_tokenizer(engine):
    """At this temperature the bytes are no valid UTF-8."""
    params = SamplingParams(temperature=4.0, max_tokens=40, n=4, seed=0)
    [output] = engine.generate(PROMPT, params, progress=False)
    *_, last = engine.stream(PROMPT, params)
    for out, streamed in zip(output.outputs, last.outputs, strict=True):
        assert "\ufffd" in out.text
        assert out.text == engine.tokenizer.decode(out.token_ids, skip_special_tokens=True)
        assert (streamed.token_ids, streamed.text) == (out.token_ids, out.text)


def test_a_stop_token_that_is_eos_as_well_is_eos(engine, ending):
    params, _ = ending
    plain, named = complete(engine, **params), complete(engine, **params, stop_token_ids=[EOS])
    assert (named.text, named.token_ids) == (plain.text, plain.token_ids)
    assert (named.finish_reason, named.stop_reason) == ("stop", None)
    ignored = complete(engine, **params, stop_token_ids=[EOS], ignore_eos=True)
    assert (ignored.text, ignored.stop_reason) == (plain.text, EOS)
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    ignored = complete(engine, **params, stop_token_ids=[EOS], ignore_eos=True, **shown)
    assert ignored.text == plain.text + "<|eos|>"


@pytest.mark.parametrize("shown", [False, True])
def test_beams_end_by_stop_tokens_and_eos_as_sequences_do(engine, shown):
    """A stop token that is EOS as well is EOS: it has no stop reason, and is no text."""
    common = {"temperature": 1.0, "beam_width": 4, "n": 4, "max_tokens": 24}
    common["include_stop_str_in_output"] = shown
    stops = {"stop_token_ids": [ord("e")]}
    for params in (stops, stops | {"stop_token_ids": [ord("e"), EOS]}):
        [output] = engine.generate(PROMPT, SamplingParams(**common, **params), progress=False)
        ended = [out for out in output.outputs if out.finish_reason == "stop"]
        assert ended
        for out in ended:
            last = out.token_ids[-1]
            assert out.stop_reason == (None if last == EOS else last)
            hidden = last != EOS and not shown
            text = engine.tokenizer.decode(
                out.token_ids[: -1 if hidden else None], skip_special_tokens=True
            )
            assert out.text == text


def test_eos_named_as_a_stop_token_ends_beams_without_a_stop_reason(engine):
    prompt = 'bject\noverriding "__or__()" or "__ror__()" special m'  # the end of a text it knows
    params = {"beam_width": 2, "n": 2, "max_tokens": 40}
    found = []
    for stop in ((), (EOS,)):
        [output] = engine.generate(
            prompt, SamplingParams(**params, stop_token_ids=stop), progress=False
        )
        found.append([(out.token_ids, out.stop_reason, out.text) for out in output.outputs])
    assert found[0] == found[1]
    assert any(tokens[-1] == EOS for tokens, _, _ in found[0])
    assert all(reason is None for _, reason, _ in found[0])


@pytest.mark.parametrize("shown", [False, True])
def test_a_stream_never_shows_what_a_stop_string_cuts(engine, plain, shown):
    """While a text may yet turn out to end in a stop string, its end is held back."""
    stop = {plain[18:26], plain[19:23] + "never"}
    params = {"temperature": 0, "max_tokens": 40, "stop": stop, "include_stop_str_in_output": shown}
    texts = [part.outputs[0].text for part in engine.stream(PROMPT, params)]
    end = plain.index(plain[18:26]) + (8 if shown else 0)
    assert texts[-1] == plain[:end] == complete(engine, **params).text
    assert all(texts[-1].startswith(text) for text in texts)
