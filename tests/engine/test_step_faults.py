"""A step that raises, at any of its calls to the device: nothing is lost, or its requests alone."""

import warnings

import pytest

from paged_jax import SamplingParams
from paged_jax.executor import jax_executor
from tests.conftest import assert_idle
from tests.engine.device_faults import CALLS, TAKE_THE_CACHE, DeviceFault, Faults
from tests.engine.mixed_requests import TEXT, essence

LETTERS = TEXT.encode()


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | changes
    )


# More than the pool of 56 blocks holds, so that it swaps; samples and beams, so that it copies.
REQUESTS = {
    "greedy": (LETTERS[:60], greedy(50)),
    "samples": (LETTERS[100:140], SamplingParams(n=2, seed=3, max_tokens=24, ignore_eos=True)),
    "scored": (LETTERS[200:260], greedy(24, prompt_logprobs=1)),
    "beams": (LETTERS[300:330], SamplingParams(beam_width=2, max_tokens=8, ignore_eos=True)),
    "last": (LETTERS[400:470], greedy(24)),
}


LIMITS = {
    "block_size": 4,
    "num_blocks": 56,
    "preemption_mode": "swap",
    "swap_space_blocks": 56,
}


@pytest.fixture(scope="module")
def small(engine_with):
    return engine_with(**LIMITS)


@pytest.fixture(scope="module")
def pipelined(engine_with):
    return engine_with(**LIMITS, pipelined=True)


def add(engine, names=tuple(REQUESTS)) -> None:
    for name in names:
        prompt, params = REQUESTS[name]
        engine.add_request(name, list(prompt), params)


def finish(engine) -> dict:
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.core.scheduler.memory.check_invariants()
    return outputs


def essences(outputs: dict) -> dict:
    return {name: essence(output) for name, output in outputs.items()}


@pytest.fixture(scope="module")
def wanted(small):
    """Without a fault; every call to the device occurs."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, "no call")
        add(small)
        outputs = essences(finish(small))
    assert set(faults.num_calls) == set(CALLS)
    return outputs


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CALLS)
def test_a_step_that_raises_once_changes_nothing(small, wanted, monkeypatch, name, when):
    """Where it took the cache, an empty one takes its place, and all is computed again."""
    faults = Faults(monkeypatch, name, when=when)
    reset_cache, resets = small.executor.reset_cache, []
    monkeypatch.setattr(small.executor, "reset_cache", lambda: resets.append(reset_cache()))
    add(small)
    with pytest.warns(RuntimeWarning, match=f"planned again: DeviceFault: {name} is at fault"):
        outputs = finish(small)
    assert faults.num_raised == 1
    assert essences(outputs) == wanted
    assert {output.error for output in outputs.values()} == {None}
    assert len(outputs["scored"].prompt_logprobs) == len(REQUESTS["scored"][0])
    assert len(resets) == (when == "after" and name in TAKE_THE_CACHE)
    assert_idle(small)


def test_a_later_chunk_that_always_loses_the_cache_ends_its_request(engine, monkeypatch):
    """Its first chunk, which is computed again each time, is no progress."""
    prefill, marked = jax_executor.prefill_step, 7

    def faulty(params, cache, tokens, *rest, **static):
        result = prefill(params, cache, tokens, *rest, **static)
        if marked in tokens:
            raise DeviceFault("a bad token")
        return result

    monkeypatch.setattr(jax_executor, "prefill_step", faulty)
    engine.add_request("bad", [*LETTERS[:40], marked], greedy(4))
    with pytest.warns(RuntimeWarning, match="a step has failed"):
        outputs = finish(engine)
    assert outputs["bad"].error == "its step failed twice: DeviceFault: a bad token"
    [output] = engine.generate([list(LETTERS[:40])], greedy(4), progress=False)
    assert output.error is None
    assert_idle(engine)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CALLS)
def test_a_step_that_raises_twice_ends_its_requests_and_no_others(
    small, wanted, monkeypatch, name, when
):
    Faults(monkeypatch, name, at=1, times=2, when=when)
    add(small)
    with pytest.warns(RuntimeWarning, match="a step has failed"):
        outputs = finish(small)
    failed = {name: output for name, output in outputs.items() if output.error is not None}
    assert failed
    for output in failed.values():
        assert "its step failed twice: DeviceFault" in output.error
        reasons = {out.finish_reason for out in output.outputs}
        assert "error" in reasons
        assert reasons <= {"error", "length"}
        for out, whole in zip(output.outputs, wanted[output.request_id], strict=True):
            if output.request_id != "beams":  # what they were is not what they become
                assert whole[1][: len(out.token_ids)] == out.token_ids
    others = outputs.keys() - failed.keys()
    assert {other: essence(outputs[other]) for other in others} == {
        other: wanted[other] for other in others
    }
    assert_idle(small)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_always_raises_ends_requests_and_nothing_hangs(
    small, wanted, monkeypatch, name, when
):
    """Whoever ends without it gets all there is."""
    Faults(monkeypatch, name, times=10**6, anything=False, when=when)
    add(small)
    with pytest.warns(RuntimeWarning, match="a step has failed"):
        outputs = finish(small)
    assert_idle(small)
    failed = {name for name, output in outputs.items() if output.error is not None}
    if name == "prefill_step":
        assert failed == REQUESTS.keys()
    elif when == "after" and name in TAKE_THE_CACHE:
        assert not failed, "all that the cache held is prefilled, token by token if need be"
    else:
        assert failed
    for request, output in outputs.items():
        if request in failed:
            assert f"its step failed twice: DeviceFault: {name} is at fault" == output.error
        else:
            assert essence(output) == wanted[request]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CALLS)
def test_a_pipelined_step_that_raises_once_changes_nothing(
    pipelined, wanted, monkeypatch, name, when
):
    """Neither does the iteration that was planned behind it."""
    num_ahead = 0

    def count(stats):
        nonlocal num_ahead
        num_ahead += stats.is_ahead

    monkeypatch.setattr(pipelined.core, "on_iteration", count)
    Faults(monkeypatch, name, when=when)
    add(pipelined)
    with pytest.warns(RuntimeWarning, match="planned again"):
        outputs = finish(pipelined)
    assert essences(outputs) == wanted
    assert num_ahead > 10
    assert_idle(pipelined)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_step_is_no_fault_and_loses_nothing(small, wanted, monkeypatch, name, when):
    """As by Ctrl-C: it is raised, and whoever turns the engine again gets everything."""
    Faults(monkeypatch, name, when=when, error=KeyboardInterrupt)
    add(small)
    outputs = {}
    num_interrupts = 0
    while small.has_work:
        try:
            outputs |= {output.request_id: output for output in small.step()}
        except KeyboardInterrupt:
            num_interrupts += 1
        small.core.scheduler.memory.check_invariants()
    assert num_interrupts == 1
    assert essences(outputs) == wanted


def test_whoever_cannot_be_swapped_out_ends_with_the_step_that_was_to_do_it(small, monkeypatch):
    """Left as it is, it would fail every step to come."""
    faults = Faults(monkeypatch, "read_step", times=2)
    add(small)
    with pytest.warns(RuntimeWarning, match="a step has failed"):
        [small.step() for _ in iter(lambda: faults.num_raised < 2, False)]
    assert small.core.scheduler.num_swapped == 0
    memory = small.core.scheduler.memory
    assert memory.num_free_swap_blocks == memory.num_swap_blocks
    finish(small)


def test_an_engine_without_room_for_a_new_cache_says_so_and_goes_on_when_there_is(
    small, wanted, monkeypatch
):
    Faults(monkeypatch, "decode_step", at=3, when="after")
    add(small)
    with monkeypatch.context() as patch:
        patch.setattr(jax_executor.jnp, "zeros", no_room)
        with pytest.raises(MemoryError):
            finish(small)
    with pytest.warns(RuntimeWarning, match="planned again"):
        outputs = finish(small)
    assert essences(outputs) == wanted


def no_room(*args):
    raise MemoryError


def test_pinned_prefixes_that_go_with_the_cache_are_reported(small, wanted, monkeypatch):
    prompt = list(LETTERS[500:524])
    assert small.pin_prefix(prompt) == 24
    Faults(monkeypatch, "decode_step", at=3, when="after")
    add(small, ["samples"])
    with pytest.warns(RuntimeWarning) as seen:
        outputs = finish(small)
    assert "pinned prefixes in 6 blocks: pin them again" in " ".join(str(w.message) for w in seen)
    assert essence(outputs["samples"]) == wanted["samples"]
    with pytest.raises(KeyError):
        small.unpin_prefix(prompt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert small.pin_prefix(prompt) == 24
    small.unpin_prefix(prompt)


def test_a_prefix_that_cannot_be_computed_is_not_pinned(small, monkeypatch):
    Faults(monkeypatch, "prefill_step", times=2)
    with (
        pytest.warns(RuntimeWarning, match="a step has failed"),
        pytest.raises(RuntimeError, match="the prefix could not be computed: its step failed"),
    ):
        small.pin_prefix(list(LETTERS[600:624]))
    assert small.core.scheduler.memory.num_pinned_blocks == 0
