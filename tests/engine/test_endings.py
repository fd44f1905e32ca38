"""A request is aborted, or its time is up, in every state that it can be in."""

from dataclasses import dataclass, field, replace

import pytest

from paged_jax import SamplingParams
from paged_jax.scheduling.checks import QueueFull
from paged_jax.scheduling.request import Request, SequenceStatus
from tests.conftest import assert_idle
from tests.engine.mixed_requests import TEXT, essence

WAITING, RUNNING, SWAPPED = (
    SequenceStatus.WAITING,
    SequenceStatus.RUNNING,
    SequenceStatus.SWAPPED,
)
LETTERS = TEXT.encode()
GREEDY = {"temperature": 0, "ignore_eos": True}


def prompt_at(start: int, length: int) -> list[int]:
    return list(LETTERS[start : start + length])


def statuses(request: Request) -> set[SequenceStatus]:
    return {seq.status for seq in request.sequences}


@dataclass(frozen=True)
class State:
    """How a request gets into a state, and how to tell that it is there."""

    params: dict
    is_there: object  # request -> bool
    num_prompt: int = 40
    others: tuple[int, ...] = ()  # tokens that those before it generate
    num_other_prompt: int = 40
    limits: dict = field(default_factory=dict)


# Another request of 35 blocks at its end takes what the one under test needs to go on.
SMALL = {"block_size": 4, "num_blocks": 56}
SWAP = SMALL | {"preemption_mode": "swap", "swap_space_blocks": 56}
STATES = {
    "waiting": State(
        GREEDY | {"max_tokens": 20},
        lambda r: statuses(r) == {WAITING} and r.num_preemptions == 0,
        others=(30, 30, 30, 30),
    ),
    "between two chunks of its prompt": State(
        GREEDY | {"max_tokens": 20},
        lambda r: 0 < r.sequences[0].num_computed_tokens < 100,
        num_prompt=100,
        others=(30,),
    ),
    "running": State(
        GREEDY | {"max_tokens": 20},
        lambda r: r.sequences[0].num_output_tokens == 5,
        others=(30, 30),
    ),
    "preempted": State(
        GREEDY | {"max_tokens": 80},
        lambda r: statuses(r) == {WAITING} and r.num_preemptions > 0,
        others=(100,),
        limits=SMALL | {"preemption_mode": "recompute"},
    ),
    "swapped": State(
        GREEDY | {"max_tokens": 80},
        lambda r: statuses(r) == {SWAPPED},
        others=(100,),
        limits=SWAP,
    ),
    "swapped between two chunks of its prompt": State(
        GREEDY | {"max_tokens": 8},
        lambda r: statuses(r) == {SWAPPED} and r.sequences[0].num_output_tokens == 0,
        num_prompt=120,
        others=(100, 100, 100),
        num_other_prompt=32,
        limits=SWAP,
    ),
    "samples swapped": State(
        {"n": 2, "seed": 5, "max_tokens": 60, "ignore_eos": True},
        lambda r: statuses(r) == {SWAPPED},
        others=(100,),
        limits=SWAP,
    ),
    "some samples running, some waiting": State(
        {"n": 6, "seed": 5, "max_tokens": 20, "ignore_eos": True},
        lambda r: statuses(r) == {RUNNING, WAITING} and r.sequences[0].num_output_tokens > 3,
        others=(30,),
    ),
    "one of three samples ended": State(
        {"n": 3, "seed": 8, "max_tokens": 60},
        lambda r: sum(seq.is_finished for seq in r.sequences) == 1,
        others=(30,),
    ),
    "beams": State(
        {"beam_width": 3, "max_tokens": 20, "ignore_eos": True},
        lambda r: r.beam_search.num_tokens == 6,
        others=(30,),
    ),
    "beams swapped": State(
        {"beam_width": 2, "max_tokens": 60, "ignore_eos": True},
        lambda r: statuses(r) == {SWAPPED} and len(r.sequences) == 2,
        others=(100, 60),
        limits=SWAP,
    ),
}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine_for(engine_with):
    """As `engine_with`; whatever a test leaves in an engine is none of the next one's business."""
    engines = []

    def get(**limits):
        engines.append(engine_with(**limits))
        return engines[-1]

    yield get
    for engine in engines:
        for request_id in engine._delivery.request_ids:
            engine.abort(request_id)
        engine.step()


def serve(engine, requests: dict[str, tuple], **arguments) -> dict:
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params, **arguments)
    return finish(engine)


def finish(engine) -> dict:
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        engine.core.scheduler.memory.check_invariants()
    assert_idle(engine)
    return outputs


@pytest.mark.parametrize("ending", ["abort", "timeout"])
@pytest.mark.parametrize("name", STATES)
def test_a_request_ends_in_any_state_and_leaves_the_others_alone(
    engine_for, monkeypatch, clock, name, ending
):
    state = STATES[name]
    engine = engine_for(**state.limits)
    scheduler, memory = engine.core.scheduler, engine.core.scheduler.memory
    params = SamplingParams(**state.params, cache_salt=ending)  # it shall compute, not find
    victim = prompt_at(1000, state.num_prompt), params
    others = {}
    for i, max_tokens in enumerate(state.others):
        prompt = prompt_at(50 * i, state.num_other_prompt)
        others[f"other {i}"] = prompt, SamplingParams(**GREEDY, max_tokens=max_tokens)
    whole = serve(engine, others | {"victim": (victim[0], replace(params, cache_salt=name))})

    monkeypatch.setattr(engine.core, "clock", clock)
    for other, request in others.items():
        engine.add_request(other, *request)
    engine.add_request("victim", *victim, timeout_s=50.0)
    request = engine._delivery._records["victim"].request
    outputs = {}
    while not state.is_there(request):
        outputs |= {output.request_id: output for output in engine.step()}
        assert "victim" not in outputs, f"it has never been {name}"
    num_free = memory.num_free_blocks, memory.num_free_swap_blocks
    held = bool(statuses(request) & {RUNNING}), bool(statuses(request) & {SWAPPED})
    num_timeouts = scheduler.counters.num_timeouts
    if ending == "abort":
        output = engine.abort("victim")
        now_free = memory.num_free_blocks, memory.num_free_swap_blocks
        assert [after > before for before, after in zip(num_free, now_free, strict=True)] == [
            *held
        ], "what it held is free at once"
    else:
        clock.now += 49.9
        outputs |= {output.request_id: output for output in engine.step()}
        assert "victim" not in outputs
        clock.now += 0.2
        outputs |= {output.request_id: output for output in engine.step()}
        output = outputs.pop("victim")
        assert scheduler.counters.num_timeouts == num_timeouts + 1
    memory.check_invariants()
    assert output.finished
    assert output.error is None
    reasons = [out.finish_reason for out in output.outputs]
    assert set(reasons) <= {ending, "stop", "length"}
    assert ending in reasons
    if not params.beam_width:
        for out, complete in zip(output.outputs, whole["victim"].outputs, strict=True):
            assert complete.token_ids[: len(out.token_ids)] == out.token_ids
            if out.finish_reason != ending:
                assert (out.text, out.finish_reason) == (complete.text, complete.finish_reason)
    outputs |= finish(engine)
    assert {other: essence(output) for other, output in outputs.items()} == {
        other: essence(whole[other]) for other in others
    }


def test_a_deadline_counts_from_arrival_and_may_have_passed_when_it_is_added(
    engine, monkeypatch, clock
):
    monkeypatch.setattr(engine.core, "clock", clock)
    params = SamplingParams(**GREEDY, max_tokens=5)
    engine.add_request("late", prompt_at(0, 20), params, arrival_time=10.0, timeout_s=20.0)
    engine.add_request("soon", prompt_at(0, 20), params, arrival_time=90.0, timeout_s=20.0)
    num_iterations = engine.core.num_iterations
    [late] = engine.step()
    assert late.request_id == "late"
    assert late.outputs[0].finish_reason == "timeout"
    assert late.outputs[0].token_ids == []
    assert finish(engine)["soon"].outputs[0].finish_reason == "length"
    assert engine.core.num_iterations == num_iterations + 5, "none for the one that was late"


def test_the_timeout_of_the_only_request_needs_no_iteration(engine, monkeypatch, clock):
    monkeypatch.setattr(engine.core, "clock", clock)
    engine.add_request("only", prompt_at(0, 20), SamplingParams(max_tokens=5), timeout_s=1.0)
    clock.now += 1.0
    num_iterations = engine.core.num_iterations
    [output] = engine.step()
    assert output.outputs[0].finish_reason == "timeout"
    assert engine.core.num_iterations == num_iterations
    assert_idle(engine)


def test_a_callback_and_a_stream_learn_of_a_timeout(engine, monkeypatch, clock):
    monkeypatch.setattr(engine.core, "clock", clock)
    params = SamplingParams(**GREEDY, max_tokens=20)
    got = []
    engine.add_request(
        None, prompt_at(0, 20), params, timeout_s=5.0, stream=True, on_output=got.append
    )
    for _ in range(4):
        engine.step()
    clock.now += 5.0
    assert engine.step() == []
    assert [len(output.outputs[0].token_ids) for output in got] == [1, 2, 3, 4, 4]
    assert got[-1].outputs[0].finish_reason == "timeout"


def test_a_full_queue_refuses_and_says_so_and_takes_more_later(engine_with):
    engine = engine_with(max_num_waiting=2)
    params = SamplingParams(**GREEDY, max_tokens=3)
    for i in range(2):
        engine.add_request(f"{i}", prompt_at(50 * i, 20), params)
    with pytest.raises(QueueFull, match="2") as refusal:
        engine.add_request("more", prompt_at(0, 20), params)
    assert "max_num_waiting" in str(refusal.value)
    with pytest.raises(QueueFull, match="prompt 0: "):
        engine.generate([prompt_at(0, 20)], params, progress=False)
    engine.step()  # 32 tokens: the first prompt, and some of the second
    engine.add_request("more", prompt_at(0, 20), params)
    assert finish(engine).keys() == {"0", "1", "more"}


def test_priorities_count_where_the_policy_says_so(engine_with):
    """Four fill the engine; of those that wait, the one of the lowest priority is next."""
    order = {}
    for policy in ("fcfs", "priority"):
        engine = engine_with(scheduling_policy=policy)
        params = SamplingParams(**GREEDY, max_tokens=8)
        for i in range(4):
            engine.add_request(f"running {i}", prompt_at(20 * i, 8), params)
        engine.step()
        for name, priority in (("low", 5), ("high", -5), ("middle", 0)):
            engine.add_request(name, prompt_at(0, 30), params, priority=priority)
        outputs = finish(engine)
        waited = ("low", "high", "middle")
        order[policy] = sorted(waited, key=lambda n: outputs[n].metrics.first_scheduled_s)
    assert order == {"fcfs": ["low", "high", "middle"], "priority": ["high", "middle", "low"]}
