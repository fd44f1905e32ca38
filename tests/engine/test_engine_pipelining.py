"""Real engines with host and device pipelined: what comes out, what it costs to compile, times."""

import itertools
import time

import numpy as np
import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.config import EngineConfig
from paged_jax.executor.compilation import count_compilations
from tests.conftest import assert_idle
from tests.engine.mixed_requests import TEXT, essence, mixed_requests

LETTERS = TEXT.encode()


@pytest.fixture(scope="module")
def pair(engine_with):
    """Engines that differ in nothing else: (one iteration after the other, pipelined)."""

    def of(**limits) -> tuple[Engine, Engine]:
        return engine_with(**limits), engine_with(**limits, pipelined=True)

    return of


def serve(engine: Engine, requests) -> tuple[list, list]:
    """Outputs, and the statistics of all iterations."""
    stats = []
    engine.core.on_iteration = stats.append
    prompts, params = zip(*requests, strict=True)
    outputs = engine.generate(prompts, list(params), progress=False)
    engine.core.on_iteration = None
    assert_idle(engine)
    return outputs, stats


def logprobs(output) -> list[float]:
    rows = [row for out in output.outputs for row in out.logprobs or ()]
    rows += [row for row in output.prompt_logprobs or () if row is not None]
    tops = [[value for _, value in row.top] for row in rows]
    sums = [out.cumulative_logprob or 0.0 for out in output.outputs]
    return [*(row.sampled for row in rows), *itertools.chain(*tops), *sums]


def assert_same(outputs, wanted) -> None:
    for output, want in zip(outputs, wanted, strict=True):
        assert essence(output) == essence(want)
        # Rows stand beside others in another order, which rounds differently.
        np.testing.assert_allclose(logprobs(output), logprobs(want), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "limits",
    [
        {"block_size": 4, "num_blocks": 96},
        {"block_size": 4, "num_blocks": 96, "preemption_mode": "swap", "swap_space_blocks": 200},
    ],
    ids=["recompute", "swap"],
)
def test_mixed_requests_come_out_the_same(pair, limits):
    """Of every kind, beams, whose tokens the host needs, included; prompts find each other's."""
    plain, pipelined = pair(**limits)
    requests = mixed_requests()[:16]
    requests[1] = (requests[0][0], SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=9))
    requests[5] = (requests[2][0], SamplingParams(beam_width=3, n=3, max_tokens=12))
    wanted, _ = serve(plain, requests)
    outputs, stats = serve(pipelined, requests)
    assert_same(outputs, wanted)
    assert any(each.is_ahead for each in stats)
    assert any(each.num_preempted for each in stats)


def test_most_iterations_are_planned_ahead(pair):
    plain, pipelined = pair()
    requests = mixed_requests()[:20]
    wanted, _ = serve(plain, requests)
    outputs, stats = serve(pipelined, requests)
    assert_same(outputs, wanted)
    assert sum(each.is_ahead for each in stats) > 0.9 * len(stats)


def test_streams_and_aborts_see_the_same_tokens(pair):
    """Whoever leaves while an iteration is in flight takes no token too many with him."""
    plain, pipelined = pair()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompt, other = list(LETTERS[:40]), list(LETTERS[50:90])
    wanted, wanted_other = plain.generate([prompt, other], params, progress=False)
    pipelined.add_request("other", other, params)
    stream = pipelined.stream(prompt, params)
    for _ in range(10):
        partial = next(stream)
    aborted = pipelined.abort("other")
    for output, want in ((partial, wanted), (aborted, wanted_other)):
        token_ids = output.outputs[0].token_ids
        assert token_ids == want.outputs[0].token_ids[: len(token_ids)]
        assert 10 <= len(token_ids) < 30
    *_, last = stream
    assert essence(last) == essence(wanted)
    assert_idle(pipelined)


def test_nothing_is_compiled_after_the_warm_up(tiny_model):
    engine = Engine(
        tiny_model,
        num_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=512,
        max_prefill_seqs=4,
        pipelined=True,
    )
    engine.warm_up(progress=False)
    requests = mixed_requests()[:16]
    with count_compilations() as count:
        _, stats = serve(engine, requests)
    assert count.programs == 0
    assert any(each.is_ahead for each in stats)


def test_times_say_where_the_time_went(pair):
    _, engine = pair()
    requests = mixed_requests()[:20]
    serve(engine, requests)  # everything is compiled
    start = time.perf_counter()
    _, stats = serve(engine, requests)
    elapsed = time.perf_counter() - start
    assert all(0 < each.device_s <= each.wall_s for each in stats)
    assert sum(each.wall_s for each in stats) <= elapsed
    for before, after in itertools.pairwise(stats):
        assert before.start_s + before.wall_s <= after.start_s + 1e-9
        if after.is_ahead:
            assert after.start_s - (before.start_s + before.wall_s) < 1e-3


@pytest.mark.parametrize(("platform", "default"), [("cpu", False), ("gpu", True)])
def test_iterations_are_pipelined_on_a_gpu_unless_the_caller_says(platform, default):
    model = {"model_name": "any", "max_position_embeddings": 1024}
    for pipelined, wanted in ((None, default), (True, True), (False, False)):
        assert EngineConfig(pipelined=pipelined).resolved(platform, **model).pipelined is wanted
