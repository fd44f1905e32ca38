"""Estimates of step times, from iterations of which some take much too long."""

from types import SimpleNamespace

import pytest

from paged_jax.scheduling.estimates import StepEstimates


def observe(estimates, *, decodes=0, tokens=0, outs=0, ins=0, seconds=0.0, swap_s=0.0):
    batch = SimpleNamespace(
        decodes=[None] * decodes,
        prefills=[None] * bool(tokens),
        num_prefill_tokens=tokens,
        swap_outs=[None] * outs,
        swap_ins=[None] * ins,
    )
    estimates.observe(batch, SimpleNamespace(device_s=seconds + swap_s, swap_s=swap_s))


def test_nothing_is_estimated_before_it_is_measured():
    estimates = StepEstimates()
    assert estimates.decode_s is None
    assert estimates.swapped_block_s is None
    assert estimates.prefill_token_s is None
    assert estimates.prefill_s(7) is None
    assert estimates.prefill_tokens_within(1.0) is None


def test_a_step_that_was_held_up_does_not_count():
    estimates = StepEstimates()
    for seconds in (100.0, 2.0, 2.2, 1.8, 2.0):
        observe(estimates, decodes=3, seconds=seconds)
    assert estimates.decode_s == 2.0
    for tokens in (8, 16, 24, 32, 40):
        observe(estimates, tokens=tokens, seconds=50.0 if tokens == 24 else 1.0 + tokens / 8)
    assert estimates.prefill_s(80) == pytest.approx(11.0)
    assert estimates.prefill_token_s == pytest.approx(1 / 8)


def test_decodes_and_swaps_of_an_iteration_are_no_part_of_its_prefill():
    estimates = StepEstimates()
    observe(estimates, decodes=4, seconds=3.0)
    for tokens in (10, 20):
        observe(
            estimates, decodes=4, tokens=tokens, seconds=3.0 + tokens, outs=3, ins=1, swap_s=8.0
        )
    assert estimates.swapped_block_s == 2.0
    assert estimates.prefill_s(30) == pytest.approx(30.0)
    assert estimates.decode_s == 3.0


def test_how_many_tokens_fit_in_a_time():
    estimates = StepEstimates()
    for tokens in (10, 20, 30):
        observe(estimates, tokens=tokens, seconds=1.0 + tokens / 10)
    assert estimates.prefill_tokens_within(3.05) == 20
    assert estimates.prefill_tokens_within(0.5) <= 0


def test_prefills_of_one_size_tell_the_cost_of_a_token():
    estimates = StepEstimates()
    for seconds in (4.0, 5.0, 6.0):
        observe(estimates, tokens=10, seconds=seconds)
    assert estimates.prefill_token_s == 0.5
    assert estimates.prefill_s(20) == 10.0


def test_old_iterations_are_forgotten():
    estimates = StepEstimates()
    for seconds in (1.0, 2.0):
        for _ in range(40):
            observe(estimates, decodes=1, seconds=seconds)
    assert estimates.decode_s == 2.0


def test_iterations_without_measured_time_do_no_harm():
    estimates = StepEstimates()
    for tokens in (10, 20, 10):
        observe(estimates, tokens=tokens)
    assert estimates.prefill_s(1000) == pytest.approx(0.0, abs=1e-6)
    assert estimates.prefill_tokens_within(1.0) > 10**6
