"""Shared by all tests: compiled programs are kept between runs, and the tiny model is read once."""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TINY_LM = TESTS / "fixtures" / "tiny_lm"

# Before JAX is imported. Compiling takes most of the tests' time; a second run is twice as fast.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(TESTS.parent / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.fixture(scope="session")
def tiny_model():
    """The trained byte-level model of tests/fixtures/tiny_lm, in float32."""
    from paged_jax.loading import load_model

    return load_model(str(TINY_LM), "float32")
