"""Limits that depend on the machine, and what a refusal must not change."""

import subprocess
import sys
from pathlib import Path

import pytest

from paged_jax import Engine, SamplingParams

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
from paged_jax.warm_up import WarmUp
def slow():
    time.sleep(0.5)
    raise RuntimeError
WarmUp({str(i): slow for i in range(400)})
"""
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, timeout=60)
