"""Observers that watch an engine for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from paged_jax.engine.core import EngineCore, Observer


@contextmanager
def watch(core: EngineCore, *observers: Observer) -> Iterator[None]:
    """They see what the engine does until this is left, and are closed then.

    What a timeline shows of requests that were in work before begins with nothing: begin to watch
    an engine that is idle.
    """
    core.observers += observers
    try:
        yield
    finally:
        core.observers = [each for each in core.observers if each not in observers]
        for observer in observers:
            observer.close()
