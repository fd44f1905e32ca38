"""The real engine over contiguous memory: the same outputs, from consecutive blocks."""

import numpy as np
import pytest

from paged_jax import Engine, SamplingParams
from tests.engine.mixed_requests import mixed_requests, serve

POLICIES = ("orca_max", "orca_pow2", "orca_oracle")


@pytest.fixture(scope="module")
def requests():
    return mixed_requests()


@pytest.fixture(scope="module")
def wanted(engine_with, requests):
    return serve(engine_with(), requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_are_those_of_paged_memory(engine_with, requests, wanted, policy):
    """In a pool for two of the longest. For samples, blocks are copied that paged memory shares."""
    engine = engine_with(memory_policy=policy)
    assert serve(engine, requests) == wanted
    assert engine.core.scheduler.counters.num_preemptions == 0


@pytest.mark.slow  # long searches that branch and die
@pytest.mark.parametrize("policy", POLICIES)
def test_beams_are_those_of_paged_memory(engine_with, policy):
    """They branch and die, and each time whole sequences are copied, more than one step holds."""
    params = SamplingParams(beam_width=4, max_tokens=40, temperature=0)
    prompts = ["The class of an object is ", "A function is "]

    def beams(engine):
        outputs = engine.generate(prompts, params, progress=False)
        return [[(beam.token_ids, beam.cumulative_logprob) for beam in o.outputs] for o in outputs]

    engine = engine_with(memory_policy=policy, max_model_len=256)  # four of these fit
    before = engine.sharing_stats.copies
    found, expected = beams(engine), beams(engine_with())
    assert engine.sharing_stats.copies - before > 100
    for beams_found, beams_expected in zip(found, expected, strict=True):
        assert [tokens for tokens, _ in beams_found] == [tokens for tokens, _ in beams_expected]
        np.testing.assert_allclose(
            [score for _, score in beams_found], [score for _, score in beams_expected], rtol=1e-4
        )


def test_a_running_sequence_has_consecutive_blocks(engine_with):
    engine = engine_with(memory_policy="orca_pow2")
    engine.add_request("r", "The ", SamplingParams(max_tokens=70, temperature=0, ignore_eos=True))
    engine.step()
    scheduler = engine.core.scheduler
    [seq] = scheduler.queues.running()
    table = scheduler.memory.block_table(seq.seq_id)
    assert table == list(range(table[0], table[0] + 9))  # 4 or 5 tokens and 128
    engine.abort("r")


def test_nothing_can_be_pinned(engine_with):
    engine = engine_with(memory_policy="orca_oracle")
    with pytest.raises(ValueError, match="pin"):
        engine.pin_prefix("The class of an object is ")


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"memory_policy": "orca"}, "unknown memory_policy 'orca'; one of paged, orca_max"),
        ({"memory_policy": "orca_max", "num_blocks": 31}, "reserves at least 512 slots"),
        ({"memory_policy": "orca_max", "swap_space_blocks": 4}, "swaps nothing"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tiny_model, limits, message):
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 512}
    with pytest.raises(ValueError, match=message) as error:
        Engine(tiny_model, **small | {"num_blocks": 64} | limits)
    assert "\n" not in str(error.value)
