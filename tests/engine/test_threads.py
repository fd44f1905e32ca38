"""One thread at a time has an engine: others are told so, and change nothing."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from paged_jax import SamplingParams
from paged_jax.engine.turn import Turn
from tests.conftest import assert_idle
from tests.engine.mixed_requests import essence

PROMPT = list(b"A function definition is an ")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

REFUSED = (
    "thread 'stranger' has called an engine that thread 'MainThread' uses; one thread drives an "
    "engine: hand it the requests by a queue.Queue, or make all calls through a "
    "ThreadPoolExecutor(max_workers=1)"
)


def in_thread(call, name="stranger"):
    """What the call returns, or raises, in a thread of its own."""
    results = []

    def run():
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@pytest.fixture(scope="module")
def wanted(engine_with):
    return essence(engine_with().generate([PROMPT], GREEDY, progress=False)[0])


CALLS = {
    "add_request": lambda engine: engine.add_request(None, PROMPT, GREEDY),
    "step": lambda engine: engine.step(),
    "abort": lambda engine: engine.abort("mine"),
    "generate": lambda engine: engine.generate([PROMPT], GREEDY, progress=False),
    "chat": lambda engine: engine.chat([{"role": "user", "content": "hi"}], progress=False),
    "stream": lambda engine: engine.stream(PROMPT, GREEDY),
    "pin_prefix": lambda engine: engine.pin_prefix(PROMPT),
    "unpin_prefix": lambda engine: engine.unpin_prefix(PROMPT),
    "warm_up": lambda engine: engine.warm_up(progress=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_while_a_request_is_left_another_thread_s_call_is_refused(engine, wanted, name):
    engine.add_request("mine", PROMPT, GREEDY)
    engine.step()
    with pytest.raises(RuntimeError) as refusal:
        in_thread(lambda: CALLS[name](engine))
    assert str(refusal.value) == REFUSED
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [(out.request_id, essence(out)) for out in outputs] == [("mine", wanted)]


def test_a_stream_belongs_to_the_thread_that_has_the_engine(engine, wanted):
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    for call in (lambda: next(stream), stream.close):
        with pytest.raises(RuntimeError, match="thread 'stranger' has called"):
            in_thread(call)
    assert essence(list(stream)[-1]) == wanted


def test_any_thread_may_lose_a_stream(engine, wanted):
    """As the garbage collector may: the engine is free then, and the request is gone."""
    lost = [engine.stream(PROMPT, GREEDY)]
    next(lost[0])
    in_thread(lost.clear)
    assert essence(in_thread(lambda: CALLS["generate"](engine))[0]) == wanted
    assert_idle(engine)


def test_any_thread_may_read_metrics_and_close(engine):
    engine.add_request("mine", PROMPT, GREEDY)
    in_thread(engine.metrics)
    in_thread(engine.close)
    in_thread(lambda: (engine.has_work, engine.sharing_stats))
    engine.abort("mine")


def test_an_idle_engine_is_handed_over_by_a_call(engine, wanted):
    assert essence(CALLS["generate"](engine)[0]) == wanted
    assert essence(in_thread(lambda: CALLS["generate"](engine))[0]) == wanted
    assert essence(CALLS["generate"](engine)[0]) == wanted


def test_a_thread_that_has_ended_keeps_no_engine(engine, wanted):
    in_thread(lambda: engine.add_request("left", PROMPT, GREEDY))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert essence(outputs[0]) == wanted


def test_a_callback_that_waits_for_another_thread_s_call_is_told(engine):
    """The call is refused at once: nothing hangs."""

    def bad(output):
        in_thread(lambda: engine.add_request(None, PROMPT, GREEDY))

    engine.add_request("mine", PROMPT, GREEDY, on_output=bad)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert f"its on_output: RuntimeError: {REFUSED}" == outputs[0].error


def test_many_threads_at_once_get_their_output_or_a_refusal(engine, wanted):
    """Never the output of another, nor a broken engine."""
    start = threading.Barrier(8)
    got = []

    def use():
        start.wait()
        for _ in range(5):
            try:
                [output] = engine.generate([PROMPT], GREEDY, progress=False)
                got.append(essence(output))
            except RuntimeError as error:
                got.append("one thread drives an engine" in str(error))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 40
    assert all(each in (True, wanted) for each in got)
    assert wanted in got


def test_one_worker_shares_an_engine(engine, wanted):
    """The two ways that the refusal names."""
    with ThreadPoolExecutor(max_workers=1) as worker:
        calls = [worker.submit(CALLS["generate"], engine) for _ in range(3)]
        assert [essence(call.result()[0]) for call in calls] == [wanted] * 3

    requests, outputs = queue.Queue(), queue.Queue()

    def drive():
        while (prompt := requests.get()) is not None:
            engine.add_request(None, prompt, GREEDY, on_output=outputs.put)
            while engine.has_work:
                engine.step()

    driver = threading.Thread(target=drive)
    driver.start()
    for _ in range(3):
        requests.put(PROMPT)
    requests.put(None)
    assert [essence(outputs.get()) for _ in range(3)] == [wanted] * 3
    driver.join()


def test_a_call_that_fails_at_its_beginning_keeps_no_thread_out():
    def fails():
        raise KeyError

    turn = Turn(fails)
    with turn:
        pass
    with pytest.raises(KeyError):
        in_thread(turn.__enter__)
    with turn:
        pass
