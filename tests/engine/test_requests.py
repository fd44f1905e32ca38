"""Requests that are added, stepped, streamed and aborted by hand."""

import pytest

from paged_jax import SamplingParams

PROMPT = "A function definition is an "
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def text(engine_with):
    [output] = engine_with().generate(PROMPT, GREEDY, progress=False)
    return output.outputs[0].text


def run(engine) -> dict:
    """Steps until there is no work; what was returned, by request."""
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in outputs, "returned twice"
            outputs[output.request_id] = output
    return outputs


def test_step_returns_each_request_once_when_it_ends(engine, text):
    for i in range(6):
        engine.add_request(f"r{i}", PROMPT, SamplingParams(temperature=0, max_tokens=2 + i))
    outputs = run(engine)
    assert {name: out.outputs[0].text for name, out in outputs.items()} == {
        f"r{i}": text[: 2 + i] for i in range(6)
    }
    assert all(out.finished for out in outputs.values())
    assert engine.step() == []


def test_generate_keeps_the_order_of_the_prompts(engine, text):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (12, 1, 7, 3, 9)]
    outputs = engine.generate([PROMPT] * 5, params, progress=False)
    assert [out.outputs[0].text for out in outputs] == [text[:n] for n in (12, 1, 7, 3, 9)]


def test_a_prompt_may_be_text_or_tokens_alone_or_in_a_list(engine, text):
    ids = list(PROMPT.encode())
    for prompts in (
        PROMPT,
        ids,
        tuple(ids),
        {"prompt": PROMPT},
        {"prompt_token_ids": ids},
        [PROMPT, ids, {"prompt": PROMPT}],
        [ids],
    ):
        outputs = engine.generate(prompts, GREEDY, progress=False)
        assert [out.outputs[0].text for out in outputs] == [text] * len(outputs)
        assert all(out.prompt_token_ids == tuple(ids) for out in outputs)
    assert engine.generate([], GREEDY, progress=False) == []


def test_chat_uses_the_model_s_template(engine):
    chat = [{"role": "user", "content": "What is a class?"}]
    as_text = "user: What is a class?\nassistant: "
    [wanted] = engine.generate(as_text, GREEDY, progress=False)
    [one] = engine.chat(chat, GREEDY, progress=False)
    several = engine.chat([chat, chat], GREEDY, progress=False)
    for output in (one, *several):
        assert output.prompt == as_text
        assert output.outputs[0].text == wanted.outputs[0].text


def test_a_stream_yields_after_every_token_text_that_only_grows(engine, text):
    outputs = list(engine.stream(PROMPT, GREEDY))
    assert [out.outputs[0].text for out in outputs] == [text[: i + 1] for i in range(12)]
    assert [out.finished for out in outputs] == [False] * 11 + [True]
    assert [len(out.outputs[0].token_ids) for out in outputs] == list(range(1, 13))


def test_a_stream_never_shows_what_a_stop_string_takes_back(engine, text):
    stop = text[5:9]
    texts = [
        out.outputs[0].text
        for out in engine.stream(PROMPT, SamplingParams(temperature=0, max_tokens=12, stop=stop))
    ]
    assert texts[-1] == text[: text.index(stop)]
    assert all(texts[-1].startswith(shorter) for shorter in texts)


def test_a_stream_shows_at_the_end_what_no_stop_string_took(engine, text):
    params = SamplingParams(temperature=0, max_tokens=12, stop=text[-3:] + "never")
    *_, last = engine.stream(PROMPT, params)
    assert last.outputs[0].text == text
    assert last.outputs[0].finish_reason == "length"


def test_streams_side_by_side_lose_nothing(engine, text):
    """Each turns the engine, and so makes tokens for the other too."""
    streams = [engine.stream(PROMPT, GREEDY), engine.stream(PROMPT, GREEDY)]
    texts = [[], []]
    while streams:
        for i, stream in enumerate(streams):
            output = next(stream, None)
            if output is None:
                streams.remove(stream)
                break
            texts[i].append(output.outputs[0].text)
    assert texts == [[text[: i + 1] for i in range(12)]] * 2


def test_a_closed_stream_ends_its_request(engine):
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    assert engine.has_work
    stream.close()
    assert not engine.has_work


def test_a_stream_whose_request_is_aborted_ends(engine, text):
    stream = engine.stream(PROMPT, GREEDY)
    first = next(stream)
    engine.abort(first.request_id)
    [last] = stream
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == (text[:1], "abort")


def test_generate_loses_nothing_of_requests_added_before(engine, text):
    engine.add_request("mine", PROMPT, SamplingParams(temperature=0, max_tokens=3))
    [output] = engine.generate(PROMPT, GREEDY, progress=False)
    assert output.outputs[0].text == text
    assert run(engine)["mine"].outputs[0].text == text[:3]


def test_a_stream_loses_nothing_of_requests_added_before(engine, text):
    engine.add_request("mine", PROMPT, SamplingParams(temperature=0, max_tokens=3))
    *_, last = engine.stream(PROMPT, GREEDY)
    assert last.outputs[0].text == text
    assert run(engine)["mine"].outputs[0].text == text[:3]


def test_a_stream_goes_on_when_others_turn_the_engine(engine, text):
    stream = engine.stream(PROMPT, GREEDY)
    first = next(stream)
    engine.generate(PROMPT, GREEDY, progress=False)
    assert first.outputs[0].text == text[0]
    *_, last = stream
    assert last.finished
    assert last.outputs[0].text == text


def test_own_names_do_not_collide_with_those_given_by_the_engine(engine, text):
    number = int(engine.add_request(None, PROMPT, GREEDY).removeprefix("request-"))
    mine = f"request-{number + 1}"
    engine.add_request(mine, PROMPT, GREEDY)
    engine.generate(PROMPT, GREEDY, progress=False)
    assert run(engine)[mine].outputs[0].text == text


def test_a_name_is_in_use_until_its_stream_has_been_read(engine, text):
    stream = engine.stream(PROMPT, GREEDY)
    name = next(stream).request_id
    while engine.has_work:
        assert not engine.step()
    with pytest.raises(ValueError, match=f"request '{name}' has outputs to be read"):
        engine.add_request(name, PROMPT, GREEDY)
    *_, last = stream
    assert last.outputs[0].text == text
    engine.add_request(name, PROMPT, GREEDY)
    assert run(engine)[name].outputs[0].text == text


def test_abort_while_waiting(engine, text):
    for i in range(5):
        engine.add_request(f"r{i}", PROMPT, GREEDY)
    output = engine.abort("r3")
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
    outputs = run(engine)
    assert set(outputs) == {"r0", "r1", "r2", "r4"}
    assert {out.outputs[0].text for out in outputs.values()} == {text}


def test_abort_between_prefill_chunks(engine, text):
    engine.add_request("long", list(b"x" * 100), GREEDY)
    engine.step()
    engine.add_request("other", PROMPT, GREEDY)
    output = engine.abort("long")
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
    assert run(engine)["other"].outputs[0].text == text


def test_abort_while_decoding_returns_what_is_there(engine, text):
    for name in ("a", "b", "c"):
        engine.add_request(name, PROMPT, GREEDY)
    for _ in range(5):
        engine.step()
    output = engine.abort("b")
    out = output.outputs[0]
    assert (out.finish_reason, out.text) == ("abort", text[: len(out.token_ids)])
    assert 0 < len(out.token_ids) < 12
    outputs = run(engine)
    assert {name: out.outputs[0].text for name, out in outputs.items()} == {"a": text, "c": text}


def test_abort_while_preempted(engine_with):
    """The pool holds both prompts, which share nothing, but not both outputs."""
    engine = engine_with(block_size=4, num_blocks=96)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for name in ("old", "young"):
        engine.add_request(name, f"{name:5} function definitions are " * 5, params)  # 38 blocks
    before = engine.core.scheduler.counters.num_preemptions
    while engine.core.scheduler.counters.num_preemptions == before:
        engine.step()
    output = engine.abort("young")
    assert output.metrics.num_preemptions == 1
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) > 0
    assert len(run(engine)["old"].outputs[0].token_ids) == 100


def test_nothing_comes_of_a_request_after_its_abort(engine):
    engine.add_request("mine", PROMPT, SamplingParams(temperature=0, max_tokens=50), stream=True)
    engine.generate(PROMPT, GREEDY, progress=False)  # makes tokens for the other too
    assert len(engine.abort("mine").outputs[0].token_ids) >= 10
    assert engine.step() == []


def test_abort_keeps_the_continuations_that_have_ended(engine):
    params = SamplingParams(n=3, seed=8, temperature=1.0, max_tokens=60)
    [whole] = engine.generate(PROMPT, params, progress=False)
    by_length = sorted(whole.outputs, key=lambda out: len(out.token_ids))
    assert by_length[0].finish_reason == "stop", "one ends early"
    name = engine.add_request(None, PROMPT, params, stream=True)
    ended = False
    while not ended:
        for output in engine.step():
            ended = any(out.finish_reason for out in output.outputs)
    output = engine.abort(name)
    reasons = [out.finish_reason for out in output.outputs]
    assert reasons.count("stop") == 1
    assert reasons.count("abort") == 2


def test_abort_of_what_is_not_there_does_nothing(engine):
    assert engine.abort("nobody") is None
    engine.add_request("ended", PROMPT, GREEDY)
    run(engine)
    assert engine.abort("ended") is None


def test_the_default_pool_holds_every_sequence_at_its_longest(tiny_model):
    from paged_jax import Engine
    from tests.conftest import SMALL_LIMITS

    engine = Engine(tiny_model, **SMALL_LIMITS | {"num_blocks": None, "block_size": 100})
    assert engine.num_blocks == engine.core.scheduler.memory.num_total_blocks == 4 * 6
    assert engine.executor.cache.num_blocks == 4 * 6 + 1


def test_times_and_arrival_are_on_one_clock(engine):
    engine.add_request("late", PROMPT, SamplingParams(temperature=0, max_tokens=4, n=2))
    metrics = run(engine)["late"].metrics
    times = metrics.token_times_s
    assert [len(sequence) for sequence in times] == [4, 4]
    assert metrics.arrival_s <= metrics.first_scheduled_s <= metrics.first_token_s
    assert metrics.last_token_s == max(sequence[-1] for sequence in times)
    assert all(sequence == sorted(sequence) for sequence in times)


def test_statistics_of_iterations_add_up(tiny_model):
    from paged_jax import Engine
    from tests.conftest import SMALL_LIMITS

    stats = []
    engine = Engine(tiny_model, **SMALL_LIMITS, on_iteration=stats.append)
    engine.generate([list(b"x" * 50), PROMPT], GREEDY, progress=False)
    assert [s.index for s in stats] == list(range(len(stats)))
    assert sum(s.num_prefill_tokens for s in stats) == 50 + len(PROMPT)
    assert sum(s.num_decodes for s in stats) == 2 * 11
    assert sum(s.num_finished for s in stats) == 2
    assert all(0 <= s.device_s <= s.wall_s for s in stats)
    assert all(s.usage.total == 64 * 16 for s in stats)
    assert stats[-1].num_running == stats[-1].num_waiting == 0


def test_params_may_be_a_dict_alone_or_in_a_list(engine, text):
    params = {"temperature": 0, "max_tokens": 12}
    for given in (params, [params], (GREEDY,), iter([params])):
        [output] = engine.generate([PROMPT], given, progress=False)
        assert output.outputs[0].text == text
    outputs = engine.generate([PROMPT] * 2, [params, GREEDY], progress=False)
    assert [output.outputs[0].text for output in outputs] == [text] * 2
    chat = [{"role": "user", "content": PROMPT}]
    [by_dict], [by_params] = (engine.chat(chat, each, progress=False) for each in (params, GREEDY))
    assert by_dict.outputs[0].text == by_params.outputs[0].text
    *_, last = engine.stream(PROMPT, params)
    assert last.outputs[0].text == text
    engine.add_request("r", PROMPT, params)
    assert run(engine)["r"].outputs[0].text == text


@pytest.mark.parametrize("params", ["greedy", 5, [{"temprature": 0}], {"temprature": 0}], ids=str)
def test_params_of_another_form_are_refused_before_anything_runs(engine, params):
    with pytest.raises(ValueError, match=r"params must be SamplingParams|did you mean 'temperatur"):
        engine.generate([PROMPT], params, progress=False)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("truncate", "max_tokens", "num_kept"),
    [(5, 12, 5), (100, 12, 28), (1, 12, 1), (-1, 12, 28), (-1, 500, 12), (-1, None, 28)],
)
def test_the_last_tokens_of_a_prompt_are_kept(engine, truncate, max_tokens, num_kept):
    """The model takes 512 tokens, prompt and output together."""
    params = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    [whole] = engine.generate(PROMPT[-num_kept:], params, progress=False)
    [output] = engine.generate(
        PROMPT, {**params, "truncate_prompt_tokens": truncate}, progress=False
    )
    assert output.prompt == PROMPT
    assert bytes(output.prompt_token_ids).decode() == PROMPT[-num_kept:]
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids
    fits = 512 - num_kept
    assert len(whole.outputs[0].token_ids) == min(max_tokens or fits, fits)


def test_a_prompt_that_is_too_long_is_served_once_it_is_truncated(engine):
    long = PROMPT * 20
    with pytest.raises(ValueError, match="560 tokens leaves no room"):
        engine.generate(long, GREEDY, progress=False)
    [output] = engine.generate(
        long, {"temperature": 0, "max_tokens": 12, "truncate_prompt_tokens": -1}, progress=False
    )
    assert len(output.prompt_token_ids) == 500
    assert output.outputs[0].finish_reason == "length"
    to_the_end = {"max_tokens": None, "min_tokens": 7, "truncate_prompt_tokens": -1}
    [output] = engine.generate(long, to_the_end, progress=False)
    assert len(output.prompt_token_ids) == 505
    assert len(output.outputs[0].token_ids) == 7


@pytest.mark.parametrize("kind", [{}, {"n": 2, "seed": 1}, {"beam_width": 2}], ids=str)
@pytest.mark.parametrize("limits", [{}, {"pipelined": True}, {"memory_policy": "orca_oracle"}])
def test_without_max_tokens_an_output_goes_to_the_end(engine_with, limits, kind):
    engine = engine_with(**limits)
    prompt = list(b"x" * 480)
    params = {"max_tokens": None, "ignore_eos": True, **kind}
    for given in (params, params | {"max_tokens": 10**6}):
        [output] = engine.generate(prompt, given, progress=False)
        assert {(len(out.token_ids), out.finish_reason) for out in output.outputs} == {
            (32, "length")
        }
