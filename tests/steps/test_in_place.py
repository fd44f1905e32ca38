"""The compiled steps touch only what they write of the cache, however large the pool."""

import re

import jax
import pytest

from paged_jax import Engine

# What may yield an array of the cache's shape: names for it, and scatters into it.
_ALIASES = {"parameter", "get-tuple-element", "bitcast", "scatter"}


@pytest.fixture(scope="module")
def executor(tiny_model):
    engine = Engine(
        tiny_model,
        num_blocks=52,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=144,
        warm_up=False,
    )
    return engine.executor


def passes_over_cache(text: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions of an optimised HLO module that compute a whole array of `shape`."""
    dims = ",".join(map(str, shape))
    scatters = set(re.findall(r"^%(\S+) .*\{\n(?:  [^R].*\n)*  ROOT %scatter", text, re.MULTILINE))
    found = []
    for line in text.splitlines():
        match = re.match(rf"\s+(?:ROOT )?%\S+ = \w+\[{dims}\]\S* ([\w-]+)\(", line)
        if not match or match[1] in _ALIASES:
            continue
        called = re.search(r"calls=%([^\s,]+)", line)
        if not (match[1] == "fusion" and called and called[1] in scatters):
            found.append(line.strip())
    return found


@pytest.mark.parametrize(
    "name", ["decode 1", "decode 2", "decode 4", "prefill 16", "prefill 32", "copy 2", "copy 4"]
)
def test_a_step_makes_no_pass_over_the_cache(executor, name):
    compiled = executor.lowerings()[name]().compile()
    assert not passes_over_cache(compiled.as_text(), executor.cache.k[0].shape)


@pytest.mark.parametrize("name", ["decode 2", "head 1", "remember 4"])
def test_a_step_makes_no_pass_over_the_history(executor, name):
    compiled = executor.lowerings()[name]().compile()
    assert not passes_over_cache(compiled.as_text(), (4, 144))


def test_a_pass_over_the_cache_is_found():
    shape = (53, 2, 16, 32)
    spec = jax.ShapeDtypeStruct(shape, "float32")
    compiled = jax.jit(lambda x: x.at[0].set(0) + 1, donate_argnums=0).lower(spec).compile()
    assert passes_over_cache(compiled.as_text(), shape)
