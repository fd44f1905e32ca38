"""The roofline: what takes how long, against figures worked out by hand."""

from dataclasses import replace

import pytest

from paged_jax.simulation.cost_model import Efficiency, RooflineCost, StepWork
from paged_jax.simulation.setups import GPUS, MODEL_SHAPES, find_gpu, find_model_shape

A100 = find_gpu("A100-40GB")
OPT_13B = find_model_shape("OPT-13B")
IDEAL = Efficiency(memory=1, matrices=1, attention=1, host=1, link=1)
NOTHING = StepWork(0, 0, (), 0, block_size=16)


def decoding(num_decodes: int, context: int) -> StepWork:
    return replace(
        NOTHING,
        num_decodes=num_decodes,
        decode_context=num_decodes * context,
    )


def prefilling(*chunks: tuple[int, int]) -> StepWork:
    return replace(NOTHING, prefills=chunks, num_first_samples=len(chunks))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("OPT-13B", 12.85),
        ("OPT-66B", 65.7),
        ("OPT-175B", 174.6),
        ("LLaMA-7B", 6.738),
        ("LLaMA-13B", 13.016),
        ("Llama-3-8B", 8.030),
        ("Llama-3-70B", 70.554),
        ("SmolLM2-135M", 0.1345),
    ],
)
def test_models_have_their_published_number_of_parameters(name, billions):
    assert find_model_shape(name).num_parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_slot_of_opt_13b_takes_800_kib_and_grouped_heads_take_less():
    assert OPT_13B.kv_bytes_per_token == 800 * 1024
    assert find_model_shape("Llama-3-8B").kv_bytes_per_token == 128 * 1024


def test_a_decode_step_reads_all_weights_and_its_context():
    parts = RooflineCost(A100, OPT_13B, efficiency=IDEAL, block_overhead_slots=0).parts(
        decoding(30, 400)
    )
    layers = 40 * 12 * 5120**2 * 2 / 1.555e12
    assert parts["matrices"] == pytest.approx(layers) == pytest.approx(16.2e-3, rel=0.01)
    assert parts["attention"] == pytest.approx(30 * 400 * 819_200 / 1.555e12)
    assert parts["head"] == pytest.approx(5120 * 50_272 * 2 / 1.555e12)


def test_a_decode_step_of_opt_13b_keeps_an_a100_busy_for_25_to_30_ms():
    parts = RooflineCost(A100, OPT_13B).parts(decoding(30, 400))
    assert 0.025 < sum(parts.values()) - parts["host"] < 0.030


def test_long_prompts_are_bound_by_arithmetic_and_short_ones_by_the_weights():
    cost = RooflineCost(A100, OPT_13B, efficiency=IDEAL)
    weights = 40 * OPT_13B.num_layer_weights
    assert cost.parts(prefilling((0, 2048)))["matrices"] == pytest.approx(
        2 * weights * 2048 / 312e12
    )
    assert cost.parts(prefilling((0, 16)))["matrices"] == pytest.approx(2 * weights / 1.555e12)


def test_attention_of_a_prompt_grows_with_the_square_of_its_length_and_with_what_precedes_it():
    cost = RooflineCost(A100, OPT_13B)
    short, long, later = (
        cost.parts(prefilling(chunk))["attention"] for chunk in ((0, 1024), (0, 2048), (1024, 1024))
    )
    assert long == pytest.approx(4 * short, rel=0.01)
    assert short + later == pytest.approx(long)


def test_decodes_and_prompts_of_an_iteration_go_through_the_model_apart():
    cost = RooflineCost(A100, OPT_13B)
    both = replace(decoding(30, 400), prefills=((0, 100),), num_first_samples=1)
    apart = cost.step_s(decoding(30, 400)) + cost.step_s(prefilling((0, 100)))
    assert cost.step_s(both) == pytest.approx(apart - cost.iteration_overhead_s)


def test_a_prompt_that_goes_on_later_is_not_sampled():
    cost = RooflineCost(A100, OPT_13B)
    work = prefilling((0, 100))
    assert cost.parts(work)["head"] > 0
    assert cost.parts(replace(work, num_first_samples=0))["head"] == 0


def test_several_gpus_divide_the_work_and_pay_for_collectives():
    one, four = (
        RooflineCost(A100, MODEL_SHAPES["OPT-66B"], num_gpus=number).parts(decoding(8, 400))
        for number in (1, 4)
    )
    for part in ("matrices", "attention", "activations", "head"):
        assert four[part] == pytest.approx(one[part] / 4)
    assert one["collectives"] == 0
    # Two of them in each of 64 layers, all of latency at this size.
    assert four["collectives"] == pytest.approx(2 * 64 * 20e-6, rel=0.1)


def test_blocks_cost_attention_more_the_smaller_they_are_and_nothing_where_slots_are_contiguous():
    cost = RooflineCost(A100, OPT_13B)
    work = decoding(8, 256)
    contiguous = cost.contiguous.parts(work)["attention"]
    of_size = {
        size: cost.parts(replace(work, block_size=size))["attention"] / contiguous
        for size in (1, 8, 16, 256)
    }
    assert of_size[1] > of_size[8] > of_size[16] > of_size[256] > 1
    assert 1.20 <= of_size[16] <= 1.26  # Figure 18a of the paper


def test_swaps_cost_their_bytes_and_many_small_copies():
    cost = RooflineCost(A100, OPT_13B, efficiency=IDEAL)
    small, large = cost.swap_s(256, 1), cost.swap_s(1, 256)
    transfer = 256 * 819_200 / 32e9
    assert large == pytest.approx(transfer + 80 * cost.swap_copy_s)
    assert small == pytest.approx(transfer + 256 * 80 * cost.swap_copy_s)
    batched = replace(cost, swap_copies_per_block=0)
    assert batched.swap_s(256, 1) == pytest.approx(transfer)
    swapping = replace(NOTHING, num_swapped_blocks=256)
    assert cost.parts(swapping)["swaps"] == pytest.approx(cost.swap_s(256, 16))


def test_copies_read_and_write_their_blocks():
    cost = RooflineCost(A100, OPT_13B, efficiency=IDEAL)
    parts = cost.parts(replace(NOTHING, num_copied_blocks=3))
    assert parts["copies"] == pytest.approx(2 * 3 * 16 * 819_200 / 1.555e12)


def test_newer_gpus_are_faster():
    times = [
        RooflineCost(gpu, OPT_13B, iteration_overhead_s=0, sequence_overhead_s=0).step_s(
            decoding(30, 400)
        )
        for gpu in GPUS.values()
    ]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times) == 5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: find_gpu("A1000"), "no description of GPU 'A1000'; there are A100-40GB"),
        (lambda: find_model_shape("OPT-1B"), "no shape of model 'OPT-1B'; there are OPT-13B"),
        (lambda: RooflineCost(A100, OPT_13B, num_gpus=3), "40 KV heads, which 3 GPUs cannot share"),
        (lambda: RooflineCost(A100, OPT_13B, iteration_overhead_s=-1), "iteration_overhead_s"),
        (lambda: Efficiency(memory=1.5), r"efficiency memory must be in \(0, 1\], got 1.5"),
    ],
)
def test_bad_input_is_refused_with_its_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()
