"""What a request gets does not depend on how, when and next to whom it is served."""

import random

import numpy as np
import pytest

from paged_jax import SamplingParams
from tests.engine.dense_model import dense_logits
from tests.engine.mixed_requests import essence, mixed_requests, serve


@pytest.fixture(scope="module")
def requests():
    return mixed_requests()


@pytest.fixture(scope="module")
def wanted(engine_with, requests):
    """As served by the engine of 16-token blocks, all at once, without preemption."""
    engine = engine_with()
    before = engine.core.scheduler.counters.num_preemptions
    outputs = serve(engine, requests)
    assert engine.core.scheduler.counters.num_preemptions == before
    return outputs


def test_the_requests_end_in_every_way(wanted):
    """So that the comparisons below compare something."""
    endings = {(out[3], type(out[4])) for outputs in wanted for out in outputs}
    assert endings >= {("stop", str), ("stop", int), ("length", type(None))}
    lengths = [len(out[1]) for outputs in wanted for out in outputs]
    assert max(lengths) > 40
    assert sum(lengths) > 500


@pytest.mark.parametrize(
    "block_size",
    [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(64, marks=pytest.mark.slow)],
)
def test_output_does_not_depend_on_block_size_and_preemption(
    engine_with, requests, wanted, block_size
):
    """The pool holds the longest request and little more."""
    engine = engine_with(block_size=block_size, num_blocks=384 // block_size)
    assert serve(engine, requests) == wanted
    assert engine.core.scheduler.counters.num_preemptions > 0


def test_output_does_not_depend_on_the_batch(engine, requests, wanted):
    """One request at a time."""
    alone = [serve(engine, [request])[0] for request in requests]
    assert alone == wanted


def test_output_does_not_depend_on_chunked_prefill(engine_with, requests, wanted):
    """Prompts in chunks of at most 5 tokens, between decodes."""
    engine = engine_with(max_num_batched_tokens=5)
    assert serve(engine, requests) == wanted


def test_output_does_not_depend_on_the_order(engine, requests, wanted):
    order = list(range(len(requests)))
    random.Random(0).shuffle(order)
    shuffled = serve(engine, [requests[i] for i in order])
    assert shuffled == [wanted[i] for i in order]


def test_output_does_not_depend_on_arrival_during_others(engine, requests, wanted):
    """Added one by one while the engine runs."""
    done = {}
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(f"late {i}", prompt, params)
        for _ in range(3):
            done |= {out.request_id: essence(out) for out in engine.step()}
    while engine.has_work:
        done |= {out.request_id: essence(out) for out in engine.step()}
    assert [done[f"late {i}"] for i in range(len(requests))] == wanted


def test_output_does_not_depend_on_others_being_aborted(engine_with, requests, wanted):
    """In a pool that preempts; every third request is given up at some point."""
    engine = engine_with(block_size=4, num_blocks=96)
    rng = random.Random(1)
    names = [f"r{i}" for i in range(len(requests))]
    for name, (prompt, params) in zip(names, requests, strict=True):
        engine.add_request(name, prompt, params)
    doomed, done = names[::3], {}
    while engine.has_work:
        done |= {out.request_id: essence(out) for out in engine.step()}
        if doomed and rng.random() < 0.1:
            aborted = engine.abort(doomed.pop(rng.randrange(len(doomed))))
            if aborted is not None:
                i = names.index(aborted.request_id)
                for out, whole in zip(aborted.outputs, wanted[i], strict=True):
                    assert out.token_ids == whole[1][: len(out.token_ids)]
    assert len(done) < len(requests)
    for name, outputs in done.items():
        assert outputs == wanted[names.index(name)]


@pytest.mark.parametrize("attention", ["reference", "gather_sdpa"])
def test_output_does_not_depend_on_the_attention(engine_with, requests, wanted, attention):
    engine = engine_with(attention=attention, max_num_seqs=1, max_num_batched_tokens=16)
    assert serve(engine, requests[::5]) == wanted[::5]


def test_streams_end_with_what_generate_returns(engine, requests, wanted):
    for (prompt, params), outputs in list(zip(requests, wanted, strict=True))[::3]:
        *_, last = engine.stream(prompt, params)
        assert last.finished
        assert essence(last) == outputs


def test_greedy_tokens_are_those_of_a_dense_forward_pass(tiny_model, requests, wanted):
    """Each token has the largest logit after those before it, by a margin that rounding is not."""
    logits = dense_logits(tiny_model)
    num_checked = 0
    for (prompt, sampling), outputs in zip(requests, wanted, strict=True):
        if not sampling.is_greedy or sampling.has_penalties or sampling.min_tokens:
            continue
        tokens = [*prompt, *outputs[0][1]]
        rows = logits(tokens)[len(prompt) - 1 : len(tokens) - 1]
        assert rows.argmax(axis=-1).tolist() == outputs[0][1]
        second, first = np.sort(rows, axis=-1)[:, -2:].T
        assert (first - second).min() > 1e-4
        num_checked += len(rows)
    assert num_checked > 200


def test_unseeded_requests_differ_but_follow_the_engine_seed(tiny_model):
    """Built anew from the same seed, an engine draws the same; its requests draw differently."""
    from paged_jax import Engine
    from tests.conftest import SMALL_LIMITS

    def texts(seed):
        engine = Engine(tiny_model, **SMALL_LIMITS, seed=seed)
        outputs = engine.generate(["The "] * 4, SamplingParams(max_tokens=12), progress=False)
        return [out.outputs[0].text for out in outputs]

    first = texts(7)
    assert len(set(first)) == 4
    assert texts(7) == first
    assert texts(8) != first
