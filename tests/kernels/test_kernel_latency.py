"""Latency of attention kernels: inputs, baselines, timing, rows, and the script."""

import csv
import json
import math
import re
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernels import baselines, latency, measure
from experiments.kernels.baselines import Attention, attention_for
from experiments.kernels.shapes import (
    GEOMETRIES,
    Geometry,
    Shape,
    paged,
    parse_geometry,
    random_inputs,
    relative_error,
    wanted,
)
from pallas_kernels.paged_attention import Unsupported
from pallas_kernels.targets import TARGETS, compiling_for

ROOT = Path(__file__).parents[2]
SMALL = Shape(Geometry(4, 2, 64), batch=3, context=27, block_size=8, dtype="float32")
LLAMA = Shape(GEOMETRIES["llama3-8b"], 64, 4096, 16, "bfloat16")


# Shapes


@pytest.mark.parametrize(
    ("text", "geometry"),
    [
        ("llama3-8b", (32, 8, 128)),
        ("opt-13b", (40, 40, 128)),
        ("smollm2", (9, 3, 64)),
        ("6/2/80", (6, 2, 80)),
    ],
)
def test_a_geometry_is_a_name_or_numbers_and_prints_so(text, geometry):
    assert parse_geometry(text) == geometry
    assert str(Geometry(*geometry)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama", "a geometry is one of llama3-8b, .* got 'llama'"),
        ("32/8", "got '32/8'"),
        ("32/0/128", "got '32/0/128'"),
        ("32/5/128", "32/5/128: query heads must be a multiple of KV heads"),
    ],
)
def test_a_geometry_that_is_none_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_geometry(text)


def test_the_least_traffic_counts_every_key_and_value_once():
    assert LLAMA.kv_bytes == 2 * 64 * 4096 * 8 * 128 * 2
    assert replace(SMALL, block_size=16).kv_bytes == SMALL.kv_bytes == 2 * 3 * 27 * 2 * 64 * 4


def test_blocks_hold_the_contiguous_caches_at_places_that_differ_by_seed():
    inputs = random_inputs(SMALL, 0)
    B, Hk, L, D = inputs.k.shape
    orders = []
    for seed in (1, 2):
        q, k, v, tables, lens = paged(inputs, seed, shape=SMALL, cache_head_size=128)
        assert sorted(tables.ravel().tolist()) == list(range(3 * 4))
        for cache, contiguous in ((k, inputs.k), (v, inputs.v)):
            assert cache.shape == (12, 2, 8, 128)
            rows = jnp.moveaxis(cache[tables], 2, 1).reshape(B, Hk, L, 128)
            np.testing.assert_array_equal(rows[..., :64], contiguous)
            assert not rows[..., 64:].any()
        orders.append(tables.tolist())
    assert orders[0] != orders[1]


def test_what_is_wanted_agrees_with_numpy_in_float64():
    inputs = random_inputs(replace(SMALL, queries=3), 0)
    q, k, v = (np.asarray(x, np.float64) for x in inputs[:3])
    keys, values = (np.repeat(x, 2, axis=1) for x in (k, v))
    weights = np.exp(np.einsum("bthd,bhld->bhtl", q, keys) / math.sqrt(64))
    weights *= np.arange(32) <= np.array([24, 25, 26])[:, None]
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = np.einsum("bhtl,bhld->bthd", weights, values)
    assert relative_error(wanted(inputs), jnp.asarray(expected, jnp.float32)) < 1e-6


def test_a_nan_is_an_error_that_no_tolerance_takes():
    inputs = random_inputs(SMALL, 0)
    target = wanted(inputs)
    assert math.isnan(relative_error(target.at[0, 0, 0, 0].set(jnp.nan), target))


# Implementations


@pytest.mark.parametrize("name", ["reference", "xla", "xla_contiguous", "jax_paged"])
def test_an_implementation_computes_attention_in_its_own_layout(name):
    shape = replace(SMALL, block_size=8, context=29)
    inputs = random_inputs(shape, 0)
    chosen = attention_for(name, shape, interpret=True)
    arguments = chosen.prepare(inputs, 3)
    for settings, attend in chosen.variants.items():
        out = jax.jit(attend)(*arguments)
        assert relative_error(out, wanted(inputs)) < 1e-5, settings


def test_a_prefill_is_measured_like_a_decode_and_refused_by_those_that_decode():
    shape = replace(SMALL, queries=9)
    row = measure.measure("xla", shape, copy_gb_per_s=1, seconds=0)
    assert (row.verdict, row.queries) == ("right", 9)
    with pytest.raises(Unsupported, match="xla_contiguous is here for decoding, not for 9"):
        attention_for("xla_contiguous", shape)
    with pytest.raises(ValueError, match="28 queries do not fit into 27 tokens"):
        replace(SMALL, queries=28)


def test_the_contiguous_kernel_has_the_body_of_the_paged_one():
    shape = Shape(Geometry(4, 2, 64), batch=2, context=61, block_size=16, dtype="bfloat16")
    row = measure.measure("contiguous", shape, copy_gb_per_s=1, seconds=0, interpret=True)
    assert (row.verdict, row.block_size) == ("right", None)


def lowered_for_cuda(name: str, shape: Shape) -> str:
    """The text of an implementation that needs cuDNN, as JAX would hand it to XLA for a GPU."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    with mock.patch.object(cudnn, "check_cudnn_version", return_value=91000):
        chosen = attention_for(name, shape)
        inputs = jax.eval_shape(lambda: random_inputs(shape, 0))
        arguments = jax.eval_shape(lambda inputs: chosen.prepare(inputs, 0), inputs)
        (attend,) = chosen.variants.values()
        return jax.jit(attend).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_cudnn_takes_our_blocks_as_they_are():
    text = lowered_for_cuda("cudnn_paged", LLAMA)
    (call,) = (line for line in text.splitlines() if "@__cudnn$fmhaSoftmax" in line)
    assert "\\22is_paged_attention\\22: true" in call
    assert "\\22mask_type\\22: \\22PADDING\\22" in call
    cache, table = "tensor<16384x8x16x128xbf16>", "tensor<64x1x256x1xi32>"
    types = "tensor<64x32x1x128xbf16>, " + ", ".join(
        [cache, cache, "tensor<64xi32>", "tensor<64xi32>", table, table]
    )
    assert types in call
    assert "stablehlo.transpose" not in text.split("__cudnn$fmhaSoftmax")[0]


def test_cudnn_over_contiguous_caches_lowers():
    text = lowered_for_cuda("cudnn_contiguous", LLAMA)
    assert re.search(r"__cudnn\$fmhaSoftmax.*tensor<64x4096x8x128xbf16>", text)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there may be a cuDNN")
def test_cudnn_is_refused_with_the_reason_where_there_is_none():
    with pytest.raises(Unsupported, match="no cuDNN here: "):
        attention_for("cudnn_paged", SMALL)


def test_jax_own_kernel_splits_by_what_divides_the_table():
    chosen = attention_for("jax_paged", LLAMA)
    assert list(chosen.variants) == ["16 splits", "4 splits", "1 splits"]
    assert list(attention_for("jax_paged", SMALL).variants) == ["4 splits", "1 splits"]
    with pytest.raises(Unsupported, match="powers of two"):
        attention_for("jax_paged", replace(SMALL, geometry=Geometry(4, 2, 80)))


def test_a_name_that_nothing_has_is_refused():
    with pytest.raises(ValueError, match=r"unknown attention 'flash'; choose of reference, .*xla"):
        baselines.check_name("flash")
    baselines.check_name("my_folder.my_kernel")


# Timing


def sleeper(seconds: float):
    """A function that takes so long, and the arguments it was called with."""
    seen = []

    def sleep(x):
        seen.append(int(x))
        time.sleep(seconds)
        return x

    result = jax.ShapeDtypeStruct((), jnp.int32)
    return lambda x: jax.pure_callback(sleep, result, x), seen


SETS = [(jnp.int32(i),) for i in range(5)]


def test_the_clock_measures_how_long_a_call_takes_and_uses_every_set():
    function, seen = sleeper(0.005)
    timed = measure.time_calls(function, SETS, seconds=0.05)
    assert 0.005 < timed.low <= timed.seconds <= timed.high
    assert timed.seconds < 0.05
    assert timed.method == "clock"
    assert set(seen) == set(range(5))


def test_on_a_gpu_several_calls_make_a_program_and_none_is_in_it_twice(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    function, seen = sleeper(0.002)
    timed = measure.clocked_calls(function, SETS, seconds=0.05)
    assert 0.002 < timed.seconds < 0.02
    assert timed.calls % 5 == 0
    for first in range(0, len(seen), 5):
        assert set(seen[first : first + 5]) == set(range(5))


def fake_cupti(monkeypatch, durations_ms):
    """JAX's profiler, which reports these durations; how often it was started and stopped."""
    calls = []
    extension = types.SimpleNamespace(
        _cupti_init=lambda: calls.append("start"),
        _cupti_get_timings=lambda finalize: (
            calls.append("stop") or [("kernel", ms) for ms in durations_ms()]
        ),
    )
    module = types.SimpleNamespace(_mosaic_gpu_ext=extension)
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", module)
    monkeypatch.setattr(sys.modules["jax._src.lib"], "mosaic_gpu", module, raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return calls


def test_device_time_of_a_call_is_the_sum_of_its_kernels(monkeypatch):
    function, seen = sleeper(0)
    # Two kernels a call, of 1 and 2 ms; three calls to warm up and one to compile are not profiled.
    calls = fake_cupti(monkeypatch, lambda: [1.0, 2.0] * (len(seen) - 4))
    timed = measure.time_calls(function, SETS, seconds=0)
    assert timed == measure.Timing(0.003, 0.003, 0.003, measure.MIN_CALLS, "profiler")
    assert calls == ["start", "stop"]


def test_the_clock_stands_in_where_cupti_lost_kernels(monkeypatch):
    function, _ = sleeper(0)
    fake_cupti(monkeypatch, lambda: [1.0] * (measure.MIN_CALLS + 1))
    with pytest.raises(measure.NoProfiler, match="recorded 6 kernels of 5 equal calls"):
        measure.profiled_calls(function, SETS, 0)
    assert measure.time_calls(function, SETS, seconds=0).method == "clock"


def test_the_profiler_is_stopped_when_a_call_fails(monkeypatch):
    calls = fake_cupti(monkeypatch, list)

    def fail():
        raise KeyError("a kernel's fault")

    with pytest.raises(KeyError):
        measure.kernel_seconds(fail)
    assert calls == ["start", "stop"]


def test_sets_exceed_the_caches_and_fit_into_memory():
    with compiling_for(TARGETS["H200"]):
        l2 = TARGETS["H200"].l2_size
        assert measure.num_sets(LLAMA.kv_bytes) == 1
        assert measure.num_sets(l2 // 2) == 2 * measure.CACHE_MULTIPLE
        assert measure.num_sets(1000) == measure.MAX_SETS
        assert measure.num_sets(l2 // 2, memory=3 * l2) == 6


def test_copy_bandwidth_counts_what_is_read_and_what_is_written(monkeypatch):
    timed = measure.Timing(0.5, 0.5, 0.5, 1, "clock")
    monkeypatch.setitem(measure.COPY_BYTES, jax.default_backend(), 1000)
    monkeypatch.setattr(measure, "time_calls", lambda *_: timed)
    monkeypatch.setattr(measure, "clocked_calls", lambda *_: timed._replace(seconds=0.25))
    assert measure.copy_bandwidth() == 2 * 1000 / 0.25


# Rows


def fixed_attention(monkeypatch, variants):
    """`measure` gets these variants over contiguous caches; the sets they were timed on."""
    made = Attention(lambda inputs, seed: tuple(inputs), variants)
    monkeypatch.setattr(measure, "attention_for", lambda *_, **__: made)
    timed = []

    def time_calls(attend, sets, *, seconds):
        timed.append(attend)
        return measure.Timing(*[1e-3 * len(timed)] * 3, 7, "clock")

    monkeypatch.setattr(measure, "time_calls", time_calls)
    return timed


def attend(q, k, v, lens):
    (variant,) = attention_for("xla_contiguous", SMALL).variants.values()
    return variant(q, k, v, lens)


def test_the_fastest_variant_counts(monkeypatch):
    timed = fixed_attention(monkeypatch, {"a": attend, "b": attend})
    row = measure.measure("xla", SMALL, copy_gb_per_s=1)
    assert len(timed) == 2
    assert (row.settings, row.verdict, row.time_us) == ("a", "right", 1e3)
    assert row.gb_per_s == pytest.approx(SMALL.kv_bytes / 1e-3 / 1e9)
    assert row.copy_fraction == row.gb_per_s
    assert row.error is not None
    assert row.error < 1e-6


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        (lambda *args: attend(*args) * 1.01, "wrong: relative error 0.01, at most 0.002"),
        (lambda *args: attend(*args).at[0, 0, 0, 0].set(jnp.nan), "wrong: relative error nan"),
    ],
    ids=["off by a hundredth", "NaN"],
)
def test_a_wrong_output_is_no_time(monkeypatch, wrong, verdict):
    timed = fixed_attention(monkeypatch, {"a": attend, "b": wrong})
    row = measure.measure("xla", SMALL, copy_gb_per_s=1)
    assert row.verdict.startswith(verdict)
    assert (row.settings, row.time_us, timed) == ("b", None, [])


def test_what_a_kernel_refuses_is_a_row_that_says_so():
    row = measure.measure("triton", SMALL, copy_gb_per_s=1)
    assert row.verdict.startswith("refused: ")
    assert "GPU" in row.verdict


def test_a_shape_beyond_memory_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(measure, "CPU_MEMORY_BYTES", 1 << 16)
    row = measure.measure("xla", SMALL, copy_gb_per_s=1)
    assert row.verdict.startswith("refused: keys and values of 0.0 GiB")


def row(name: str, time_us: float | None, **changes) -> measure.Row:
    return measure.empty_row(name, SMALL, "cpu", "right")._replace(time_us=time_us, **changes)


def test_ratios_are_to_the_baseline_on_the_same_inputs_by_the_same_clock():
    rows = [row("xla_contiguous", 10.0), row("xla", 12.0), row("xla", 12.0, context=64)]
    rows += [row("triton", None), row("xla", 12.0, method="profiler")]
    ratios = [r.ratio for r in measure.with_ratios(rows, "xla_contiguous")]
    assert ratios == [1.0, 1.2, None, None, None]


def test_tables_are_by_geometry_and_show_settings():
    rows = [row("jax_paged", 1.0, settings="4 splits"), row("xla", 1.0, geometry="opt-13b")]
    tables = measure.tables(rows)
    assert list(tables) == ["4/2/64, float32, decode, cpu", "opt-13b, float32, decode, cpu"]
    [[first], _] = tables.values()
    assert first["implementation"] == "jax_paged (4 splits)"
    assert list(first) == list(measure.COLUMNS)


def test_the_figure_shows_the_papers_ratios(tmp_path):
    rows = measure.with_ratios([row("xla_contiguous", 10.0), row("xla", 12.0)], "xla_contiguous")
    latency.plot(rows, latency.Config(baseline="xla_contiguous", out_dir=str(tmp_path)))
    assert (tmp_path / "latency.png").stat().st_size > 10_000
    assert latency.PAPER_RATIO == (1.20, 1.26)


# The script


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.kernels.latency", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow  # a whole experiment
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="defaults of a CPU")
def test_a_short_run_leaves_results_table_and_plot(tmp_path):
    result = run(
        *("--batch=2", "--context=32", "--block_size=8,16", "--seconds=0"),
        *("--impl=xla,cudnn_paged", f"--out_dir={tmp_path}"),
    )
    assert result.returncode == 0, result.stderr
    assert "smollm2, float32, decode, cpu" in result.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    cases = results["cases"]
    assert [(case["implementation"], case["block_size"]) for case in cases] == [
        ("xla_contiguous", None),
        ("xla", 8),
        ("xla", 16),
        ("cudnn_paged", 8),
        ("cudnn_paged", 16),
    ]
    assert [case["verdict"].split(":")[0] for case in cases] == ["right"] * 3 + ["refused"] * 2
    assert all(case["time_us"] > 0 and case["ratio"] > 0 for case in cases[:3])
    assert results["copy_gb_per_s"] > 0
    assert results["paper_ratio"] == [1.2, 1.26]
    with (tmp_path / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 5
    assert (tmp_path / "latency.png").exists()


def test_an_unknown_kernel_is_bad_input(tmp_path):
    result = run("--impl=flash", f"--out_dir={tmp_path}")
    assert result.returncode == 2
    assert "error: unknown attention 'flash'" in result.stderr
