"""Penalties, biases, min_tokens, masks and logits processors, in a real engine.

Outputs are those of float64 rules over a dense forward pass, however a request is served.
"""

import numpy as np
import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.executor import histories, jax_executor
from paged_jax.executor.compilation import count_compilations
from tests.conftest import SMALL_LIMITS, assert_idle
from tests.engine.constraints import Raising, TokensOf
from tests.engine.dense_model import dense_logits
from tests.engine.mixed_requests import BOS, TEXT, essence
from tests.steps.logit_reference import PROCESSORS, changed_logits

LETTERS = set(b"abcdefghijklmnopqrstuvwxyz")
VOWELS = set(b"aeiouy")
# (sampling parameters, what the constraint allows in turns)
KINDS = (
    ({"repetition_penalty": 1.3}, None),
    ({"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 0.8}, None),
    ({"min_tokens": 12, "stop_token_ids": [*range(0, 200)]}, None),
    ({"logit_bias": {101: -8.0, 32: -100.0, 120: 3.0}}, None),
    ({"logit_bias": {97: 2.5}, "temperature": 1.1, "top_k": 9, "n": 2}, None),
    ({"logits_processors": "not_again"}, None),
    ({"logits_processors": ["unlike_the_past", "by_turns"], "temperature": 0.9}, None),
    ({}, (LETTERS - VOWELS, VOWELS)),
    ({"temperature": 1.3, "n": 3}, (VOWELS, LETTERS, {32, 10})),
    ({"repetition_penalty": 1.5, "logits_processors": "not_again"}, (LETTERS, LETTERS | {32})),
    ({}, None),
    ({"presence_penalty": 1.0, "logprobs": 2, "temperature": 1.0, "n": 2, "best_of": 3}, None),
)


def workload() -> list[tuple[list[int], SamplingParams, tuple | None]]:
    """Two requests of each kind; some prompts begin alike."""
    requests = []
    for i in range(2 * len(KINDS)):
        params, allowed = KINDS[i % len(KINDS)]
        length = 4 + (i * 37) % 90
        prompt = [BOS, *TEXT[60 * (i % 9) :].encode()[: length - 1]]
        options = {"temperature": 0, "seed": i, "max_tokens": 16 + 7 * (i % 5), "ignore_eos": True}
        requests.append((prompt, SamplingParams(**options | params), allowed))
    return requests


def add(engine: Engine, name: str, prompt, params, allowed, *, constraint=TokensOf) -> None:
    engine.add_request(name, prompt, params)
    if allowed is not None:
        for seq in engine.core.scheduler.queues.waiting:
            if seq.request.request_id == name:
                seq.constraint = constraint(*allowed)


def serve(engine: Engine, requests) -> list:
    stats = []
    engine.core.on_iteration = stats.append
    for i, request in enumerate(requests):
        add(engine, f"{i}", *request)
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    engine.core.on_iteration = None
    assert_idle(engine)
    engine.stats = stats
    return [essence(outputs[f"{i}"]) for i in range(len(requests))]


@pytest.fixture(scope="module")
def engine_of(tiny_model):
    def build(**limits) -> Engine:
        options = SMALL_LIMITS | {"max_num_seqs": 8, "max_model_len": 160, "num_blocks": 200}
        return Engine(tiny_model, logits_processors=PROCESSORS, **options | limits)

    return build


@pytest.fixture(scope="module")
def roomy(engine_of):
    return engine_of()


@pytest.fixture(scope="module")
def wanted(roomy):
    return serve(roomy, workload())


def test_greedy_tokens_are_those_of_float64_rules_over_a_dense_forward_pass(tiny_model, wanted):
    logits = dense_logits(tiny_model)
    num_checked = 0
    for (prompt, params, allowed), outputs in zip(workload(), wanted, strict=True):
        tokens = outputs[0][1]
        if not params.is_greedy:
            continue
        rows = logits(prompt + tokens)[len(prompt) - 1 :]
        for at, token in enumerate(tokens):
            x = changed_logits(
                rows[at],
                params,
                prompt,
                tokens[:at],
                end_token_ids=set(params.stop_token_ids),
                allowed=None if allowed is None else allowed[at % len(allowed)],
            )
            second, first = np.sort(x)[-2:]
            assert x.argmax() == token
            assert first - second > 1e-4, "no margin: choose another prompt"
            num_checked += 1
    assert num_checked > 250


def test_outputs_are_the_same_alone(roomy, wanted):
    assert [serve(roomy, [request])[0] for request in workload()] == wanted


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("pipelined", [False, True])
def test_outputs_are_the_same_when_preempted(engine_of, wanted, mode, pipelined):
    engine = engine_of(
        block_size=4,
        num_blocks=110,
        preemption_mode=mode,
        swap_space_blocks=300,
        pipelined=pipelined,
        watermark=0.0,
    )
    assert serve(engine, workload()) == wanted
    counters = engine.core.scheduler.counters
    assert counters.num_preemptions > 3
    assert (counters.num_preemptions_by_swap > 0) == (mode == "swap")


def test_outputs_are_the_same_in_chunks(engine_of, wanted):
    assert serve(engine_of(max_num_batched_tokens=8), workload()) == wanted


def test_outputs_are_the_same_pipelined_and_all_but_constraints_run_ahead(engine_of, wanted):
    engine = engine_of(pipelined=True)
    assert serve(engine, workload()) == wanted
    free = [i for i, request in enumerate(workload()) if request[2] is None]
    assert serve(engine, [workload()[i] for i in free]) == [wanted[i] for i in free]
    assert sum(each.is_ahead for each in engine.stats) > 0.85 * len(engine.stats)


@pytest.mark.parametrize("pipelined", [False, True])
def test_nothing_is_compiled_after_the_warm_up(engine_of, wanted, pipelined):
    engine = engine_of(pipelined=pipelined)
    engine.warm_up(progress=False)
    with count_compilations() as count:
        assert serve(engine, workload()) == wanted
        serve(engine, [([97], SamplingParams(n=5), ({98}, set()))])  # no token is left
    assert count.programs == 0


def test_a_request_that_no_token_is_left_for_fails_alone(roomy, wanted):
    requests = workload()
    prompt = requests[0][0]
    params = SamplingParams(temperature=0, max_tokens=9)
    for name, *bad in (
        ("no first", params, (set(),)),
        ("no third", params, ({97}, {98}, set())),
        ("both", SamplingParams(min_tokens=5, stop_token_ids=[97]), ({97},)),
    ):
        add(roomy, name, prompt, *bad)
    for i in range(4):
        add(roomy, f"{i}", *requests[i])
    outputs = {}
    while roomy.has_work:
        outputs |= {output.request_id: output for output in roomy.step()}
    for name, number in (("no first", 0), ("no third", 2), ("both", 0)):
        assert outputs[name].error == (
            "its constraint, min_tokens, logit_bias or logits_processors leave no token to be "
            f"output token {number}"
        )
    assert outputs["no third"].outputs[0].token_ids == [97, 98]
    assert [essence(outputs[f"{i}"]) for i in range(4)] == wanted[:4]
    assert_idle(roomy)


@pytest.mark.parametrize("after", [0, 3])
def test_a_constraint_that_raises_fails_its_request_alone(roomy, wanted, after):
    prompt, params, _ = workload()[0]
    add(roomy, "bad", prompt, params, (after,), constraint=Raising)
    add(roomy, "good", *workload()[0])
    outputs = {}
    while roomy.has_work:
        outputs |= {output.request_id: output for output in roomy.step()}
    assert outputs["bad"].error == "its constraint raised RuntimeError: the grammar is broken"
    assert len(outputs["bad"].outputs[0].token_ids) == after
    assert essence(outputs["good"]) == wanted[0]


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        ([abs], r"logits_processors must map names to functions, got \[<built-in function abs>\]"),
        ({3: abs}, "a logits processor's name must be a string, got 3"),
        ({"two": lambda logits: logits}, "'two' cannot be called with .*f32.259.*TypeError"),
        ({"short": lambda logits, *_: logits[1:]}, "'short' must return logits f32.259."),
        ({"whole": lambda logits, *_: logits.astype(int)}, "'whole' must return logits f32.259."),
        ({"none": lambda *_: None}, "'none' must return logits f32.259., but returns None"),
        ({"text": "not_again"}, "'text' cannot be called"),
    ],
)
def test_what_is_no_logits_processor_is_refused_at_construction(tiny_model, processors, message):
    with pytest.raises(ValueError, match=message) as error:
        Engine(tiny_model, logits_processors=processors, **SMALL_LIMITS)
    assert "\n" not in str(error.value)


def test_an_unknown_logits_processor_is_refused_with_those_that_are_known(roomy, engine):
    params = SamplingParams(logits_processors=["not_again", "other"])
    with pytest.raises(ValueError, match=r"'other' is unknown; .* has 'not_again', 'by_turns', "):
        roomy.add_request(None, "a", params)
    with pytest.raises(ValueError, match="'not_again' is unknown; this engine has none"):
        engine.add_request(None, "a", params)


@pytest.mark.filterwarnings("ignore:a step has failed and is planned again:RuntimeWarning")
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("module", "step"),
    [(histories, "remember_step"), (jax_executor, "decode_step"), (jax_executor, "head_step")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_steps_that_raise_now_and_then_change_no_output(
    engine_of, wanted, monkeypatch, module, step, when, pipelined
):
    """What is on the device by then, or lost with the step, is as it would have been."""
    engine = engine_of(pipelined=pipelined)
    whole, calls = getattr(module, step), []

    def faulty(*args, **kwargs):
        calls.append(step)
        fails = len(calls) % 5 == 3
        if fails and when == "before":
            raise RuntimeError("at fault")
        result = whole(*args, **kwargs)
        if fails:
            raise RuntimeError("at fault")
        return result

    monkeypatch.setattr(module, step, faulty)
    assert serve(engine, workload()) == wanted
    assert len(calls) > 5
