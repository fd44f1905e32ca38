"""Compiling ahead in the background: nothing twice, what is needed first."""

import os
import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from paged_jax import Engine, SamplingParams
from paged_jax.executor.compilation import WarmUp, count_compilations


def test_what_is_compiled_ahead_compiles_no_more():
    functions = {f"times {i}": jax.jit(lambda x, i=i: x * i) for i in range(5)}
    x = jnp.arange(3)
    warm_up = WarmUp({name: lambda f=f: f.lower(x) for name, f in functions.items()})
    warm_up.wait(progress=False)
    with count_compilations() as count:
        for i, f in enumerate(functions.values()):
            assert f(x).tolist() == [0, i, 2 * i]
    assert count.programs == 0


def test_what_is_required_does_not_wait_for_the_queue():
    release = threading.Event()

    def blocked(i):
        assert release.wait(timeout=60)
        return jax.jit(lambda x: x - i).lower(x)

    x = jnp.arange(3)
    f = jax.jit(lambda x: x + 43)
    # More blocked ones than threads.
    queue = {f"blocked {i}": partial(blocked, i) for i in range(os.cpu_count() or 1)}
    warm_up = WarmUp(queue | {"f": lambda: f.lower(x)})
    warm_up.require("f")
    with count_compilations() as count:
        assert f(x).tolist() == [43, 44, 45]
    assert count.programs == 0
    release.set()
    warm_up.wait(progress=False)


def test_an_error_while_compiling_ahead_is_raised_to_who_waits():
    def fails():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        WarmUp({"bad": fails}).wait(progress=False)
    with pytest.raises(ZeroDivisionError):
        WarmUp({"bad": fails}).require("bad")


def test_an_unknown_name_needs_nothing():
    WarmUp({}).require("decode 1")


def test_an_engine_that_is_still_warming_up_serves_and_compiles_nothing_twice(tiny_model):
    with count_compilations() as count:
        engine = Engine(
            tiny_model,
            num_blocks=20,
            max_num_seqs=2,
            max_num_batched_tokens=48,
            max_model_len=208,
            max_prefill_seqs=2,
        )
        engine.generate(["a", "b" * 40], SamplingParams(max_tokens=4), progress=False)
        ahead = count.programs
        engine.warm_up(progress=False)
        engine.generate(["c", "d" * 50], SamplingParams(max_tokens=9), progress=False)
        assert count.programs == ahead
