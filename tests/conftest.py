"""Shared by all tests: the tiny model and engines around it, built and compiled once."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import paged_jax  # noqa: F401  # it sets XLA's options, which must be the same whatever runs first
from pallas_kernels import extras

if TYPE_CHECKING:
    from paged_jax import Engine
    from paged_jax.loading import LoadedModel

TESTS = Path(__file__).parent
TINY_LM = TESTS / "fixtures" / "tiny_lm"

# Before JAX starts. Most of the tests' time is compilation: kept, a second run needs a third.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(TESTS.parent / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Few buckets: three of decode rows, four of prefill tokens.
SMALL_LIMITS = {
    "block_size": 16,
    "num_blocks": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 512,
    "max_prefill_seqs": 4,
    "warm_up": False,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak", type=int, default=100, help="requests of the soak test; 10000 take minutes"
    )


def pytest_configure() -> None:
    """One line in place of an error for each test, where nothing can be tested."""
    for module in ("hypothesis", "xdist"):
        if not extras.is_installed(module):
            command = extras.command("test")
            raise pytest.UsageError(f"the tests need {module}; install it with: {command}")
    try:
        extras.check_platforms()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def tiny_model() -> "LoadedModel":
    """The trained byte-level model of tests/fixtures/tiny_lm, in float32."""
    from paged_jax.loading import load_model

    return load_model(str(TINY_LM), "float32")


def assert_idle(engine: "Engine") -> None:
    """Nothing is left of any request."""
    scheduler = engine.core.scheduler
    assert not engine.has_work
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.memory.num_free_blocks == scheduler.memory.num_total_blocks
    scheduler.memory.check_invariants()
    assert engine._delivery.is_idle


@pytest.fixture(scope="session")
def engine_with(tiny_model) -> Iterator[Callable[..., "Engine"]]:
    """Engines of `SMALL_LIMITS` and what is given; asked for again, the same one, if it is idle."""
    from paged_jax import Engine

    engines: dict[tuple, Engine] = {}

    def build(**limits) -> Engine:
        key = tuple(sorted(limits.items()))
        if key not in engines:
            engines[key] = Engine(tiny_model, **SMALL_LIMITS | limits)
        assert_idle(engines[key])
        return engines[key]

    yield build
    for engine in engines.values():
        assert_idle(engine)


@pytest.fixture
def engine(engine_with) -> Iterator["Engine"]:
    """The engine of `SMALL_LIMITS`; a test must leave nothing in it."""
    engine = engine_with()
    yield engine
    try:
        assert_idle(engine)
    finally:  # other tests go on
        for request_id in engine._delivery.request_ids:
            engine.abort(request_id)
        engine.step()
