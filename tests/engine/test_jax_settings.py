"""What a researcher sets in JAX changes no output, or is refused in one line.

In this process settings come as `with` blocks, many at once; each on its own, in a process that has
it from its beginning, is slow.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.executor.compilation import count_compilations
from paged_jax.loading import LoadedModel
from pallas_kernels.block_copy import copy_blocks
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from tests.conftest import SMALL_LIMITS, TINY_LM  # noqa: F401  # of the processes
from tests.engine.mixed_requests import TEXT, essence

LETTERS = TEXT.encode()
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
REQUESTS = [
    (LETTERS[:40], GREEDY),
    (LETTERS[50:70], SamplingParams(seed=1, top_p=0.9, top_k=40, min_p=0.01, max_tokens=6)),
    (LETTERS[80:90], SamplingParams(seed=2, repetition_penalty=1.2, min_tokens=3, max_tokens=6)),
    (LETTERS[100:105], SamplingParams(n=2, seed=3, logprobs=2, prompt_logprobs=1, max_tokens=6)),
    (LETTERS[110:120], SamplingParams(beam_width=2, max_tokens=6)),
]


def serve(engine: Engine) -> list:
    prompts, params = zip(*REQUESTS, strict=True)
    outputs = engine.generate([list(prompt) for prompt in prompts], params, progress=False)
    assert [output.error for output in outputs] == [None] * len(REQUESTS)
    logprobs = [out.logprobs for output in outputs for out in output.outputs]
    return [*map(essence, outputs), logprobs, outputs[3].prompt_logprobs]


# Whether the cache holds a prompt's beginning may show in the last bits of its log-probabilities.
LIMITS = SMALL_LIMITS | {"enable_prefix_caching": False}


@pytest.fixture(scope="module")
def uncached(engine_with) -> Engine:
    return engine_with(enable_prefix_caching=False)


@pytest.fixture(scope="module")
def wanted(uncached) -> list:
    return serve(uncached)


# Each changes what some operation means that is not told its types, its shapes or its generator.
OTHER_RULES = {
    "enable_x64": True,
    "numpy_dtype_promotion": "strict",
    "numpy_rank_promotion": "raise",
    "default_prng_impl": "unsafe_rbg",
    "threefry_partitionable": False,
    "enable_custom_prng": True,
    "softmax_custom_jvp": False,
    "legacy_prng_key": "error",
}
# Each looks for something.
WATCHES = {
    "debug_nans": True,
    "debug_infs": True,
    "check_tracer_leaks": True,
    "enable_checks": True,
    "debug_key_reuse": True,
}


def settings(values: dict) -> ExitStack:
    stack = ExitStack()
    for name, value in values.items():
        stack.enter_context(getattr(jax, name)(value))
    return stack


def test_other_rules_for_types_shapes_and_random_numbers_change_no_output(uncached, wanted):
    """Nor do watches; steps compile again under some of them, and are there again after."""
    with settings(OTHER_RULES | WATCHES):
        assert serve(uncached) == wanted
    with count_compilations() as count:
        assert serve(uncached) == wanted
    assert count.programs == 0


def test_an_engine_compiles_ahead_for_the_settings_around_it(tiny_model):
    """Threads of their own do not see the `with` block, but are told."""
    with settings(OTHER_RULES | {"debug_nans": True}):
        engine = Engine(tiny_model, **SMALL_LIMITS | {"max_num_batched_tokens": 16})
        engine.warm_up(progress=False)
        with count_compilations() as count:
            engine.generate(list(LETTERS[:40]), GREEDY, progress=False)
        assert count.programs == 0


@pytest.mark.parametrize("impl", ["reference", "xla", "gather_sdpa", "triton"])
def test_kernels_keep_their_values_and_types_under_other_rules(impl):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(3, 4, 16)).astype(np.float32)
    caches = rng.normal(size=(2, 9, 2, 16, 16)).astype(np.float32)
    tables = rng.integers(1, 9, (3, 2)).astype(np.int32)
    context_lens = np.array([5, 20, 32], np.int32)
    slots = np.array([16, 33, 140], np.int32)

    def run(q, caches, tables, context_lens, slots):
        caches = write_kv(*caches, q[:, :2], q[:, 2:], slots)
        caches = copy_blocks(caches, slots[:1] // 16, slots[1:2] // 16)
        options = {"scale": 0.25, "sliding_window": 19, "impl": impl, "interpret": True}
        return paged_attention(q, *caches, tables, context_lens, **options, return_residuals=True)

    arguments = [jnp.asarray(x) for x in (q, caches, tables, context_lens, slots)]
    for call in (run, jax.jit(run)):
        wanted = call(*arguments)
        with settings(OTHER_RULES | {"debug_nans": True}):
            results = call(*arguments)
        assert [x.dtype for x in results] == [np.float32] * 3
        for result, value in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, value)


def test_a_nan_that_a_step_makes_shows_where_it_was_made(tiny_model):
    """And the engine serves on: the step that made it has changed nothing."""
    weights = dict(tiny_model.weights)
    weights["embed.embedding"] = np.array(weights["embed.embedding"])
    weights["embed.embedding"][7] = np.nan
    weights["lm_head.kernel"] = np.array(tiny_model.weights["embed.embedding"]).T
    config = replace(tiny_model.config, tie_word_embeddings=False)
    engine = Engine(LoadedModel(config, weights, tiny_model.tokenizer), **SMALL_LIMITS)
    with jax.debug_nans(True), pytest.warns(RuntimeWarning, match="a step has failed"):
        [bad] = engine.generate([[5, 6, 7]], GREEDY, progress=False)
    assert bad.error.startswith("its step failed twice: FloatingPointError: invalid value (nan)")
    with jax.debug_nans(True):
        [good] = engine.generate([[5, 6, 8]], GREEDY, progress=False)
    assert good.error is None


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"transfer_guard": "disallow"}, "jax_transfer_guard_host_to_device is 'disallow'.* 'log'"),
        ({"transfer_guard_device_to_host": "disallow_explicit"}, "device_to_host is 'disallow_ex"),
        ({"disable_jit": True, "debug_infs": True}, "jax_debug_infs with jax_disable_jit"),
        ({"default_device": "tpu"}, "jax_default_device is tpu, .* 'cpu'; .* JAX_PLATFORMS=tpu"),
    ],
    ids=str,
)
def test_settings_under_which_no_step_runs_are_refused_in_one_line(tiny_model, values, refusal):
    with settings(values), pytest.raises(ValueError, match=refusal) as raised:
        Engine(tiny_model, **SMALL_LIMITS)
    assert "\n" not in str(raised.value)


def test_nothing_is_compiled_ahead_where_jit_is_disabled(tiny_model):
    with jax.disable_jit():
        engine = Engine(tiny_model, **SMALL_LIMITS | {"warm_up": True})
        with count_compilations() as count:
            engine.warm_up(progress=False)
    assert count.programs == 0
    assert engine.executor.warm_up.waited_s == 0


# The settings of a process, each on its own


def in_process(code: str, **variables: str) -> str:
    """The last line that the code prints where these variables are set."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | variables,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()[-1]


SERVE = """
from tests.engine.test_jax_settings import *
engine = Engine(str(TINY_LM), **LIMITS | {"warm_up": True})
engine.warm_up(progress=False)
with count_compilations() as count:
    outputs = serve(engine)
print(repr((outputs, count.programs)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        *(f"{name}={value}" for name, value in (OTHER_RULES | WATCHES).items()),
        "default_prng_impl=rbg",
        "default_matmul_precision=highest",
        "high_dynamic_range_gumbel=1",
        "random_seed_offset=3",
        "log_compiles=1",
        "explain_cache_misses=1",
        "transfer_guard=log",
        "num_cpu_devices=2",
        "default_device=cpu",
        "check_static_indices=1",
        "cpu_enable_async_dispatch=0",
    ],
)
def test_a_process_of_any_setting_has_the_same_outputs_and_compiles_nothing_late(wanted, setting):
    name, value = setting.upper().split("=")
    value = {"TRUE": "1", "FALSE": "0"}.get(value, value.lower())
    assert in_process(SERVE, **{f"JAX_{name}": value}) == repr((wanted, 0))


@pytest.mark.slow
def test_a_toy_runs_with_jit_disabled(engine):
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=3, ignore_eos=True)
    code = f"""
from tests.engine.test_jax_settings import *
engine = Engine(str(TINY_LM), **SMALL_LIMITS)
print(essence(engine.generate([list(LETTERS[:20])], {params!r}, progress=False)[0]))
"""
    [output] = engine.generate([list(LETTERS[:20])], params, progress=False)
    assert in_process(code, JAX_DISABLE_JIT="1") == repr(essence(output))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "files"),
    [
        (
            ("ENABLE_X64=1", "NUMPY_DTYPE_PROMOTION=strict", "NUMPY_RANK_PROMOTION=raise"),
            ("attention_values", "attention_rows", "kv_write", "block_copy", "mosaic_gpu"),
        ),
        (("DEBUG_NANS=1", "CHECK_TRACER_LEAKS=1"), ("attention_values", "attention_rows")),
    ],
    ids=["rules", "watches"],
)
def test_the_kernels_tests_pass_under_other_settings(names, files):
    """Where NaN is watched for, those that write no NaN themselves."""
    tests = [f"tests/kernels/test_{name}.py" for name in files]
    code = f"import pytest, sys; print(pytest.main(['-n0', *{tests}]).name)"
    settings = dict(name.split("=") for name in names)
    assert in_process(code, **{f"JAX_{name}": value for name, value in settings.items()}) == "OK"
