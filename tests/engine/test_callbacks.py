"""Code of the caller's that the engine calls: callbacks of requests, and observers."""

from dataclasses import replace

import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.loading import IncrementalDetokenizer
from paged_jax.observability.observer import Observer
from tests.conftest import SMALL_LIMITS, assert_idle
from tests.engine.mixed_requests import TEXT, essence

PROMPT = list(b"A function definition is an ")
OTHER = list(TEXT[300:340].encode())
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLES = replace(GREEDY, temperature=0.9, n=2, seed=3)


def finish(engine) -> dict:
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.core.scheduler.memory.check_invariants()
    assert_idle(engine)
    return outputs


@pytest.fixture(scope="module")
def wanted(engine_with):
    engine = engine_with()
    return {
        "greedy": essence(engine.generate([PROMPT], GREEDY, progress=False)[0]),
        "samples": essence(engine.generate([OTHER], SAMPLES, progress=False)[0]),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_callback_gets_the_outputs_and_step_does_not(engine, wanted, stream):
    got = []
    engine.add_request("mine", PROMPT, GREEDY, stream=stream, on_output=got.append)
    engine.add_request("other", OTHER, SAMPLES)
    outputs = finish(engine)
    assert {name: essence(output) for name, output in outputs.items()} == {
        "other": wanted["samples"]
    }
    assert [output.finished for output in got] == [False] * (11 * stream) + [True]
    assert essence(got[-1]) == wanted["greedy"]
    if stream:
        assert [len(output.outputs[0].token_ids) for output in got] == list(range(1, 13))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", [0, 5, 11])
def test_a_callback_that_raises_ends_its_request_alone(engine, wanted, stream, call):
    """At the first output, in the middle, at the last: what it has comes out of `step`."""
    got = []

    def bad(output):
        got.append(output)
        if len(got) > call or output.finished:
            raise KeyError("nobody\nhome")

    engine.add_request("bad", PROMPT, GREEDY, stream=stream, on_output=bad)
    engine.add_request("other", OTHER, SAMPLES)
    outputs = finish(engine)
    assert essence(outputs["other"]) == wanted["samples"]
    output = outputs["bad"]
    assert output.finished
    assert output.error == r"its on_output: KeyError: 'nobody\nhome'"
    [out], [whole] = output.outputs, wanted["greedy"]
    ended_before = call == 11 or not stream
    assert out.token_ids == whole[1][: 12 if ended_before else call + 1]
    # A request that had ended by then has ended as it has.
    assert out.finish_reason == ("length" if ended_before else "error")
    assert len(got) == (call + 1 if stream else 1), "it is not called again"


def test_a_callback_may_add_requests(engine, wanted):
    """Each when the one before has ended; the last is one that `step` returns."""
    order = []

    def go_on(output):
        order.append(output.request_id)
        number = int(output.request_id)
        engine.add_request(f"{number + 1}", PROMPT, GREEDY, on_output=go_on if number < 3 else None)

    engine.add_request("0", PROMPT, GREEDY, on_output=go_on)
    assert order == []
    outputs = finish(engine)
    assert order == ["0", "1", "2", "3"]
    assert essence(outputs["4"]) == wanted["greedy"]


def test_a_request_that_a_callback_adds_and_cannot_fails_the_callback(engine):
    def bad(output):
        engine.add_request("next", [999], GREEDY)

    engine.add_request("bad", PROMPT, GREEDY, stream=True, on_output=bad)
    assert "ValueError: token id 999 is outside the vocabulary" in finish(engine)["bad"].error


@pytest.mark.parametrize("raises", [False, True])
def test_a_callback_may_abort_its_own_request(engine, wanted, raises):
    got = []

    def impatient(output):
        got.append(output)
        if len(got) == 4:
            got.append(engine.abort("mine"))
            assert not raises

    engine.add_request("mine", PROMPT, GREEDY, stream=True, on_output=impatient)
    engine.add_request("other", OTHER, SAMPLES)
    outputs = finish(engine)
    assert outputs.keys() == {"other"}
    assert essence(outputs["other"]) == wanted["samples"]
    assert got[-1].outputs[0].finish_reason == "abort"
    assert got[-1].outputs[0].token_ids == wanted["greedy"][0][1][:4]


def test_a_callback_may_abort_others_even_those_whose_output_is_on_its_way(engine):
    """Both get a token in one iteration; the first to be called ends the other."""
    got = []

    def first(output):
        got.append(output)
        if len(got) == 3:
            # Its prompt has taken one iteration more.
            assert len(engine.abort("second").outputs[0].token_ids) == 2

    seen = []
    engine.add_request("first", PROMPT, GREEDY, stream=True, on_output=first)
    engine.add_request("second", PROMPT, GREEDY, stream=True, on_output=seen.append)
    assert finish(engine) == {}
    assert len(got) == 12
    assert [len(output.outputs[0].token_ids) for output in seen] == [1], "the second is undone"


def test_callbacks_that_turn_the_engine_get_their_outputs_in_order(engine):
    orders = {"a": [], "b": []}

    def turn(output):
        orders[output.request_id].append(len(output.outputs[0].token_ids))
        if len(orders["a"]) == 3:
            engine.generate([OTHER], replace(GREEDY, max_tokens=4), progress=False)

    for name in orders:
        engine.add_request(name, PROMPT, GREEDY, stream=True, on_output=turn)
    assert finish(engine) == {}
    assert orders == {"a": list(range(1, 13)), "b": list(range(1, 13))}


def test_an_interrupt_in_a_callback_loses_no_output_of_others(engine, wanted):
    def interrupted(output):
        raise KeyboardInterrupt

    got = []
    engine.add_request("first", PROMPT, GREEDY, on_output=interrupted)
    engine.add_request("second", PROMPT, GREEDY, on_output=got.append)
    engine.add_request("third", PROMPT, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    outputs = finish(engine)
    assert [essence(output) for output in (*got, outputs["third"])] == [wanted["greedy"]] * 2


def test_an_interrupt_while_text_is_made_loses_no_request(engine, monkeypatch):
    """As by Ctrl-C, in the iteration that ends both."""
    params = replace(GREEDY, max_tokens=3, stop="zzz")
    for name in ("first", "second"):
        engine.add_request(name, list(b"The "), params)
    engine.step()
    engine.step()

    def interrupted(self, token_ids):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(IncrementalDetokenizer, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    outputs = finish(engine)
    assert {name: len(output.outputs[0].token_ids) for name, output in outputs.items()} == {
        "first": 3,
        "second": 3,
    }


def test_the_output_of_a_request_outlives_the_abort_of_another_of_its_name(engine, wanted):
    engine.add_request("name", PROMPT, GREEDY)
    engine.generate([OTHER], SAMPLES, progress=False)  # the other one ends meanwhile
    engine.add_request("name", PROMPT, GREEDY, stream=True)
    assert engine.abort("name").outputs[0].token_ids == []
    [output] = engine.step()
    assert essence(output) == wanted["greedy"]


class Broken(Observer):
    wants_stats = True

    def __init__(self, method: str):
        self.method = method
        self.num_calls = 0
        setattr(self, method, self.fail)

    def fail(self, *args):
        self.num_calls += 1
        raise OSError("the disk is full")


@pytest.mark.parametrize(
    "method", ["on_request_added", "on_step", "on_request_ended", "on_iteration"]
)
def test_an_observer_that_raises_is_let_go_and_nothing_else_changes(
    engine, wanted, monkeypatch, method
):
    broken, seen = Broken(method), []

    class Works(Observer):
        wants_stats = True

        def on_iteration(self, stats):
            seen.append(stats)

    monkeypatch.setattr(engine.core, "observers", [broken, Works()])
    with pytest.warns(RuntimeWarning, match="sees no more iterations: OSError: the disk is full"):
        [output] = engine.generate([PROMPT], GREEDY, progress=False)
    assert essence(output) == wanted["greedy"]
    assert broken.num_calls == 1
    assert len(seen) == 12
    assert broken not in engine.core.observers


def test_on_iteration_that_raises_is_let_go_and_nothing_else_changes(tiny_model, wanted):
    num_calls = 0

    def on_iteration(stats):
        nonlocal num_calls
        num_calls += 1
        assert num_calls < 3

    engine = Engine(tiny_model, **SMALL_LIMITS, on_iteration=on_iteration)
    with pytest.warns(RuntimeWarning, match="on_iteration.* sees no more iterations"):
        [output] = engine.generate([PROMPT], GREEDY, progress=False)
    assert essence(output) == wanted["greedy"]
    assert num_calls == 3


def test_a_stream_that_nobody_holds_any_more_is_aborted_before_the_next_iteration(engine, wanted):
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    del stream
    engine.add_request("other", PROMPT, GREEDY)
    engine.step()
    assert engine.core.scheduler.num_running == 1
    assert essence(finish(engine)["other"]) == wanted["greedy"]


def test_a_stream_that_nobody_has_read_goes_on_and_can_be_read_later(engine, wanted):
    stream = engine.stream(PROMPT, GREEDY)
    engine.generate([OTHER], SAMPLES, progress=False)
    outputs = list(stream)
    assert len(outputs) == 12
    assert essence(outputs[-1]) == wanted["greedy"]
