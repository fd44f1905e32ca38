"""A pool with room for a quarter of the work finishes it with the outputs of a large one.

Whichever way blocks are taken from who runs, and however small the host pool: tokens, texts,
log-probabilities and beams are those of a run in which nobody is preempted.
"""

from contextlib import suppress

import pytest

from paged_jax import Engine, SamplingParams
from tests.conftest import SMALL_LIMITS, assert_idle
from tests.engine.mixed_requests import BOS, TEXT

BLOCK_SIZE = 4
LIMITS = SMALL_LIMITS | {
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "watermark": 0.0,
}
KINDS = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.95, "logprobs": 0},
    {"temperature": 0.8, "top_k": 30, "n": 2, "logprobs": 1},
    {"beam_width": 2, "logprobs": None},
    {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 0, "prompt_logprobs": 1},
    {"temperature": 1.0, "n": 2, "presence_penalty": 0.4},
)


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Requests of every kind; two have the same prompt, in which they share blocks."""
    requests = []
    for i in range(12):
        start, length = 90 * (i % 10), 30 + 13 * (i % 4)
        prompt = [BOS, *TEXT[start:].encode()[: length - 1]]
        params = SamplingParams(
            seed=i, max_tokens=50 + 7 * (i % 5), ignore_eos=True, **KINDS[i % 6]
        )
        requests.append((prompt, params))
    return requests


def tokens_of(output) -> list[tuple]:
    return [(out.token_ids, out.text, out.finish_reason) for out in output.outputs]


def logprobs_of(output) -> list[float]:
    """All that the output tells of log-probabilities."""
    rows = [row for row in output.prompt_logprobs or [] if row is not None]
    for out in output.outputs:
        rows += out.logprobs or []
    values = [value for row in rows for value in (row.sampled, *(p for _, p in row.top))]
    sums = [out.cumulative_logprob for out in output.outputs]
    return values + [value for value in sums if value is not None]


def serve(engine) -> list:
    """The workload's outputs; the invariants hold after each step, interrupted or not."""
    scheduler, outputs = engine.core.scheduler, {}
    for i, (prompt, params) in enumerate(workload()):
        engine.add_request(f"{i}", prompt, params)
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            outputs |= {output.request_id: output for output in engine.step()}
        scheduler.memory.check_invariants()
    assert_idle(engine)
    return [outputs[f"{i}"] for i in range(len(outputs))]


@pytest.fixture(scope="module")
def engine_of(tiny_model):
    def build(**limits) -> Engine:
        return Engine(tiny_model, **LIMITS | limits)

    return build


@pytest.fixture(scope="module")
def wanted(engine_of):
    """Of a pool in which everything fits."""
    engine = engine_of(num_blocks=1000)
    outputs = serve(engine)
    assert engine.core.scheduler.counters.num_preemptions == 0
    assert sum(len(logprobs_of(output)) for output in outputs) > 1000
    return outputs


def num_blocks_of(prompt: list[int], params: SamplingParams) -> int:
    """What a request holds in the end: its sequences share the prompt's full blocks."""
    num_shared = len(prompt) // BLOCK_SIZE
    num_own = -(-(len(prompt) + params.max_tokens - 1) // BLOCK_SIZE) - num_shared
    return num_shared + (params.beam_width or params.num_sequences) * num_own


@pytest.fixture(scope="module")
def quarter() -> int:
    """Room for a quarter of the workload, and for the largest request of it."""
    sizes = [num_blocks_of(*request) for request in workload()]
    assert max(sizes) <= sum(sizes) // 4
    return sum(sizes) // 4


def assert_same(outputs, wanted) -> None:
    for output, expected in zip(outputs, wanted, strict=True):
        assert tokens_of(output) == tokens_of(expected), output.request_id
        # Sums of steps of other sizes, which round otherwise.
        assert logprobs_of(output) == pytest.approx(logprobs_of(expected), rel=1e-6, abs=5e-5)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_a_quarter_of_the_room_gives_the_same_outputs(engine_of, wanted, quarter, mode):
    engine = engine_of(num_blocks=quarter, preemption_mode=mode, swap_space_blocks=4 * quarter)
    assert_same(serve(engine), wanted)
    scheduler = engine.core.scheduler
    assert scheduler.counters.num_preemptions > 5
    assert scheduler.memory.num_free_swap_blocks == 4 * quarter
    if mode == "recompute":
        assert (
            scheduler.counters.num_preemptions_by_swap
            == scheduler.counters.num_swapped_out_blocks
            == 0
        )
        assert scheduler.counters.num_recomputed_tokens > 0
    else:
        assert scheduler.counters.num_preemptions_by_swap > 0
        assert scheduler.counters.num_swapped_out_blocks > 0
    if mode == "swap":
        assert scheduler.counters.num_preemptions_by_swap > 5
        assert (
            0
            < scheduler.counters.num_swapped_in_blocks
            <= scheduler.counters.num_swapped_out_blocks
        )


@pytest.mark.parametrize("num_swap_blocks", [0, 1, 40])
def test_a_host_pool_that_is_too_small_is_used_as_far_as_it_goes(
    engine_of, wanted, quarter, num_swap_blocks
):
    engine = engine_of(
        num_blocks=quarter, preemption_mode="swap", swap_space_blocks=num_swap_blocks
    )
    assert_same(serve(engine), wanted)
    scheduler = engine.core.scheduler
    assert scheduler.counters.num_swap_fallbacks > 0
    assert (scheduler.counters.num_preemptions_by_swap > 0) == (num_swap_blocks == 40)
    assert scheduler.counters.num_recomputed_tokens > 0
    assert scheduler.memory.num_free_swap_blocks == num_swap_blocks


def test_interrupts_before_blocks_move_change_no_output(engine_of, wanted, quarter, monkeypatch):
    """Who was to go may stay after all, and comes back into other blocks than it had."""
    engine = engine_of(num_blocks=quarter, preemption_mode="swap", swap_space_blocks=4 * quarter)
    dispatch = engine.executor.dispatch
    seen = []

    def interrupted(batch, **kwargs):
        moves = batch.swap_outs + batch.swap_ins + batch.resumed
        if moves and seen[-2:] != [True, True]:
            seen.append(True)
            raise KeyboardInterrupt
        seen.append(False)
        return dispatch(batch, **kwargs)

    monkeypatch.setattr(engine.executor, "dispatch", interrupted)
    assert_same(serve(engine), wanted)
    assert seen.count(True) > 10
    assert engine.core.scheduler.counters.num_swapped_in_blocks > 0


def test_who_comes_back_before_it_has_gone_is_found_in_its_new_blocks(
    engine_of, engine, quarter, monkeypatch
):
    """The step that was to move it is interrupted, and then there is room for it after all."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompts = [[BOS, *TEXT[start:].encode()[:149]] for start in (500, 2500)]
    [wanted] = engine.generate(prompts[1], params, progress=False)

    small = engine_of(
        num_blocks=quarter,
        preemption_mode="swap",
        swap_space_blocks=quarter,
        enable_prefix_caching=False,  # which would hold its old blocks ready
    )
    assert quarter * BLOCK_SIZE < 2 * 249, "too much for both"
    dispatch = small.executor.dispatch

    def interrupted(batch, **kwargs):
        if batch.swap_outs and batch.preempted:
            raise KeyboardInterrupt
        return dispatch(batch, **kwargs)

    monkeypatch.setattr(small.executor, "dispatch", interrupted)
    for name, prompt in zip(("old", "young"), prompts, strict=True):
        small.add_request(name, prompt, params)
    while not small.core.scheduler.num_swapped:
        with suppress(KeyboardInterrupt):
            small.step()
    small.abort("old")
    outputs = []
    while small.has_work:
        outputs += small.step()
    assert small.core.scheduler.counters.num_swapped_in_blocks > 0
    assert [tokens_of(output) for output in outputs] == [tokens_of(wanted)]
    assert_idle(small)
