"""Limits that depend on the machine, and what a refusal must not change."""

import subprocess
import sys
from pathlib import Path

import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.observability.observer import Observer

SAMPLED = SamplingParams(temperature=1.0, max_tokens=12)


def test_a_pool_larger_than_the_memory_is_refused_with_the_numbers(tiny_model):
    with pytest.raises(ValueError, match=r"num_blocks 10000000000: .* do not fit in the \d+ bytes"):
        Engine(tiny_model, num_blocks=10**10, warm_up=False)


def test_a_refused_request_does_not_change_the_samples_of_later_ones(tiny_model):
    def sampled(refused: bool) -> list[int]:
        engine = Engine(tiny_model, num_blocks=40, max_num_seqs=1, warm_up=False, seed=3)
        if refused:
            with pytest.raises(ValueError, match="max_model_len"):
                engine.add_request(None, "a" * 2000, SAMPLED)
        [output] = engine.generate("The ", SAMPLED, progress=False)
        return output.outputs[0].token_ids

    assert sampled(refused=True) == sampled(refused=False)


def test_iterations_count_what_a_stop_string_ends(tiny_model):
    stats = []
    engine = Engine(
        tiny_model, num_blocks=40, max_num_seqs=1, warm_up=False, on_iteration=stats.append
    )
    [output] = engine.generate(
        "The ", SamplingParams(temperature=0, max_tokens=40, stop="e"), progress=False
    )
    assert output.outputs[0].finish_reason == "stop"
    assert sum(step.num_finished for step in stats) == 1


def test_a_script_that_ends_does_not_wait_for_the_warm_up():
    """Minutes of slow steps are queued; the interpreter takes a moment to end."""
    script = """
import time
from paged_jax.executor.compilation import WarmUp
def slow():
    time.sleep(0.5)
    raise RuntimeError
WarmUp({str(i): slow for i in range(400)})
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, timeout=60)


@pytest.mark.slow  # compiles long prefills; test_engine_invariance.py has short ones
def test_without_chunked_prefill_every_prompt_is_computed_in_one_iteration(engine_with, engine):
    whole = engine_with(enable_chunked_prefill=False, max_num_batched_tokens=64, max_model_len=64)
    batches = []

    class Sees(Observer):
        def on_step(self, iteration):
            batches.append(iteration.batch)

    prompts = [list(b"x" * 40), list(b"y" * 50), list(b"A function is")]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    wanted = engine.generate(prompts, params, progress=False)
    whole.core.observers.append(Sees())
    try:
        outputs = whole.generate(prompts, params, progress=False)
    finally:
        whole.core.observers.pop()
    assert [out.outputs[0].token_ids for out in outputs] == [
        out.outputs[0].token_ids for out in wanted
    ]
    chunks = [chunk for batch in batches for chunk in batch.prefills]
    assert [(chunk.start, chunk.num_tokens) for chunk in chunks] == [(0, 40), (0, 50), (0, 13)]


def test_without_chunked_prefill_an_iteration_takes_the_longest_prompt_by_default(engine_with):
    engine = engine_with(enable_chunked_prefill=False, max_num_batched_tokens=None)
    assert engine.max_num_batched_tokens == engine.max_model_len == 512


@pytest.mark.parametrize(
    ("mode", "given", "num_blocks"),
    [
        ("recompute", None, 0),
        ("auto", None, 0),  # the cache is in host memory as it is
        ("swap", None, 64),
        ("swap", 5, 5),
        ("auto", 5, 5),
        ("swap", 0, 0),
    ],
)
def test_the_host_pool_is_as_large_as_it_can_be_of_use(engine_with, mode, given, num_blocks):
    engine = engine_with(preemption_mode=mode, swap_space_blocks=given)
    assert engine.num_swap_blocks == num_blocks
    assert engine.core.scheduler.memory.num_free_swap_blocks == num_blocks


def test_prefill_is_held_back_for_the_sake_of_running_requests(engine_with, engine, monkeypatch):
    """A target that no step meets leaves the shortest chunks: the same output, in more steps."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, cache_salt="target")
    requests = {"runs": list(b"A function is "), "comes": list(b"x" * 90)}
    steps, outputs = {}, {}
    for each in (engine, engine_with(target_inter_token_s=1e-9)):
        seen = []
        monkeypatch.setattr(each.core, "on_iteration", seen.append)
        each.generate(requests["runs"], params, progress=False)  # what steps take is known now
        seen.clear()
        each.add_request("runs", [1, *requests["runs"]], params)
        for _ in range(3):
            each.step()
        each.add_request("comes", requests["comes"], params)
        outputs[each] = {}
        while each.has_work:
            outputs[each] |= {out.request_id: out.outputs[0].token_ids for out in each.step()}
        steps[each] = [s.num_prefill_tokens for s in seen if s.num_prefill_tokens and s.num_decodes]
    free, held_back = steps.values()
    assert outputs[engine] == list(outputs.values())[1]
    assert max(free) > 28
    assert max(held_back) <= 16
    assert sum(held_back) == sum(free) == 90
