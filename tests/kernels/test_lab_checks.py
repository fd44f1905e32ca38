"""Verdicts of the lab on kernels that are right, wrong, and worse."""

import dataclasses
import re

import numpy as np
import pytest

from pallas_kernels.lab import attention, block_copy, kv_write
from pallas_kernels.lab.checks import (
    OPS,
    check_lowering,
    check_random_values,
    check_values,
    lab_of,
)
from pallas_kernels.lab.interpreter import OutOfBounds, Race, watch
from pallas_kernels.paged_attention import AttentionOptions
from tests.compiler import needs_compiler
from tests.kernels.toys.gather import gathered

TOYS = "tests.kernels.toys"
SMALL = attention.Spec("small", batch=4, num_heads=4, head_size=64, max_blocks=3)


# The interpreter


def test_a_kernel_without_fault_is_watched_for_races_and_returns_its_result():
    watched = watch(lambda: gathered([2, 0]))
    assert watched.looked_for_races
    np.testing.assert_array_equal(watched.result[:, 0, 0], [2, 0])


def test_a_call_without_a_kernel_is_not_said_to_be_free_of_races():
    assert watch(lambda: 3) == (3, False)


def test_a_race_is_raised_with_both_places_and_leaves_the_interpreter_usable():
    with pytest.raises(Race, match=r"race of a read at .*gather\.py:\d+.* and a write at .*gather"):
        watch(lambda: gathered([2, 0], wait=False))
    assert watch(lambda: gathered([1])).result[0, 0, 0] == 1


@pytest.mark.parametrize("entry", [-1, 3, 10**9])
def test_a_copy_from_outside_of_an_array_is_raised(entry):
    with pytest.raises(OutOfBounds, match=rf"\[{entry}, 0:8, 0:128\] in an array of \(3, 8, 128\)"):
        watch(lambda: gathered([0, entry]))


def test_other_exceptions_are_left_alone():
    with pytest.raises(KeyError, match="other"):
        watch(lambda: {}["other"])


# Values


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_right_attention_passes_with_an_error_below_its_tolerance(impl):
    result = check_random_values(impl, SMALL, 1, True)
    assert (result.verdict, result.races, result.reason) == ("pass", None, "")
    assert 0 < result.error < result.tolerance < 0.05


def test_the_same_seed_gives_the_same_error():
    first, same, other = (check_random_values("reference", SMALL, n, True).error for n in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize(
    ("impl", "verdict", "reason"),
    [
        (f"{TOYS}.forgetful", "wrong", r"out\[.*\] is .*, must be .* entries are wrong; max\["),
        (f"{TOYS}.refusing", "refused", r"^heads of 64 are out of fashion$"),
        (f"{TOYS}.racing", "race", r"a read at .*gather.py:\d+"),
        (f"{TOYS}.no_such", "failed", rf"No module named '{TOYS}.no_such'"),
    ],
)
def test_faulty_attention_gets_its_verdict(impl, verdict, reason):
    result = check_random_values(impl, SMALL, 1, True)
    assert result.verdict == verdict
    assert re.search(reason, result.reason)
    assert (result.races is True) == (verdict == "race")
    assert bool(result.details) == (verdict == "failed")


def test_a_case_of_ones_own_is_checked_with_its_options():
    case = attention.make(SMALL, np.random.default_rng(0))
    good = AttentionOptions(0.125, sliding_window=5)
    assert check_values("xla", case, good).verdict == "pass"
    assert check_values(f"{TOYS}.forgetful", case, good).verdict == "wrong"


def test_a_cache_as_wide_as_the_implementation_wants_it_is_made():
    padded = dataclasses.replace(SMALL, head_size=80)
    _, cache, *_ = attention.shapes("mosaic_gpu", padded)
    arrays = attention.arguments("mosaic_gpu", attention.make(padded, np.random.default_rng(0)))
    assert cache.shape[-1] == arrays[1].shape[-1] == 128
    assert not arrays[1][..., 80:].any()


@pytest.mark.parametrize("impl", ["mosaic_gpu", "triton"])
def test_cases_are_tuned_so_that_slots_of_a_pipeline_are_used_again_or_contexts_are_split(impl):
    def tuning(name: str):
        [spec] = [spec for spec in attention.VALUE_SPECS if spec.name == name]
        return spec, attention.value_options(impl, spec, interpret=True).tuning

    spec, long = tuning("long context")
    assert long.num_splits == 1
    assert spec.block_size * spec.max_blocks / long.block_kv > 2 * long.num_stages
    _, split = tuning("window, split")
    assert split.num_splits > 1


def test_what_a_kernel_refuses_is_not_tuned_and_neither_is_what_has_nothing_to_tune():
    refused = dataclasses.replace(SMALL, block_size=1)
    assert attention.value_options("mosaic_gpu", refused, interpret=True).tuning is None
    assert attention.value_options("xla", SMALL, interpret=True).tuning is None


@pytest.mark.parametrize("lab", [kv_write, block_copy], ids=lambda lab: lab.__name__)
def test_moves_of_numbers_must_be_exact(lab):
    op = lab.REGISTRY.op
    for spec in lab.VALUE_SPECS:
        result = check_random_values("xla", spec, 3, True, op)
        assert (result.verdict, result.error, result.tolerance) == ("pass", 0, 0), spec


@pytest.mark.parametrize("lab", [kv_write, block_copy], ids=lambda lab: lab.__name__)
def test_a_number_that_is_not_moved_is_found(lab):
    spec = lab.VALUE_SPECS[0]
    case, options = (
        lab.make(spec, np.random.default_rng(0)),
        lab.value_options("xla", spec, interpret=True),
    )
    wanted = lab.wanted(case, options, on_gpu=False)
    before = case.k_cache if lab is kv_write else case.caches[0]
    name = next(iter(wanted))
    assert (wanted[name].value != before[1:].astype(np.float64)).any()


def test_an_unknown_op_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=f"unknown op 'sort'; choose one of {', '.join(OPS)}"):
        lab_of("sort")


# Lowering


@needs_compiler
def test_what_has_no_kernel_is_lowered_without_figures():
    result = check_lowering("xla", SMALL, "A100", True)
    assert (result.verdict, result.kernels, result.registers) == ("pass", 0, None)


def test_a_kernel_is_lowered_without_figures_where_it_is_not_to_be_compiled():
    lowered = check_lowering("mosaic_gpu", kv_write.COMPILE_SPECS[0], "A100", False, "kv_write")
    assert (lowered.verdict, lowered.kernels, lowered.registers) == ("pass", 1, None)


@needs_compiler
def test_a_kernel_is_compiled_where_that_is_asked_for():
    result = check_lowering("mosaic_gpu", kv_write.COMPILE_SPECS[0], "A100", True, "kv_write")
    assert (result.verdict, result.kernels, result.spills) == ("pass", 1, 0)
    assert 8 <= result.registers <= 255
    assert 0 < result.occupancy <= 1
    assert result.limited_by in ("registers", "threads", "shared memory", "programs")
    assert result.instructions["mma.sync"] == 0


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_compiler)])
def test_what_a_gpu_has_no_use_for_is_refused(compile):
    result = check_lowering(f"{TOYS}.refusing", SMALL, "B200", compile)
    assert (result.verdict, result.reason) == ("refused", "heads of 64 are out of fashion")


def test_what_cannot_be_lowered_fails_with_the_reason():
    result = check_lowering(f"{TOYS}.racing", SMALL, "H200", False)
    assert result.verdict == "failed"
    assert result.details
