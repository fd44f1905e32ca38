"""An engine serves one thread at a time, and tells every other so."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Protocol


class Turn:
    """A `with` block in which this thread, and no other, is in the engine; blocks may be nested.

    The engine is a thread's from its first call until the engine is free again: then the next
    thread that calls has it. So is the engine of a thread that has ended.

    is_free: whether nothing is left of any request.

    RuntimeError, at once, in a thread that does not have the engine.
    """

    def __init__(self, is_free: Callable[[], bool]):
        self._is_free = is_free
        self._lock = threading.RLock()
        self._owner = 0  # a thread's identifier, none of which is 0

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if not self._lock.acquire(blocking=False):
            raise self._refusal()
        try:
            if thread != self._owner and self._owner in _names() and not self._is_free():
                raise self._refusal()
        except BaseException:
            self._lock.release()
            raise
        self._owner = thread

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()

    def _refusal(self) -> RuntimeError:
        owner = _names().get(self._owner, "another")
        return RuntimeError(
            f"thread {threading.current_thread().name!r} has called an engine that thread "
            f"{owner!r} uses; one thread drives an engine: hand it the requests by a queue.Queue, "
            "or make all calls through a ThreadPoolExecutor(max_workers=1)"
        )


def _names() -> dict[int, str]:
    """Names of the threads that are alive, by identifier."""
    return {each.ident: each.name for each in threading.enumerate() if each.ident is not None}


class _HasTurn(Protocol):
    _turn: Turn


def in_turn[Self: _HasTurn, **P, R](
    method: Callable[Concatenate[Self, P], R],
) -> Callable[Concatenate[Self, P], R]:
    """Makes a method one of those that one thread at a time may call."""

    @wraps(method)
    def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn:
            return method(self, *args, **kwargs)

    return call
