"""Faults of an engine's calls to the device, at a call of choice."""

from collections import Counter

import pytest

from paged_jax.executor import jax_executor

# The device calls of an executor, as it knows them.
CALLS = (
    "decode_step",
    "prefill_step",
    "head_step",
    "score_step",
    "copy_step",
    "read_step",
    "write_step",
)
# Those that the cache is donated to.
TAKE_THE_CACHE = {"decode_step", "prefill_step", "copy_step", "write_step"}


class DeviceFault(RuntimeError):
    pass


class Faults:
    """From the `at`-th call of `name` on, `times` calls raise: those of `name`, or of anything.

    when: "before" a call has done anything, or "after" it has run, so that what it returns is lost,
    and the cache as well if that was donated to it.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        name: str,
        *,
        at: int = 0,
        times: int = 1,
        when: str = "before",
        anything: bool = True,
        error: type[BaseException] = DeviceFault,
    ):
        self.num_calls: Counter[str] = Counter()
        self.num_raised = 0
        self._name, self._at, self._times = name, at, times
        self._when, self._anything, self._error = when, anything, error
        for call in CALLS:
            patch.setattr(jax_executor, call, self._wrapped(call, getattr(jax_executor, call)))

    def _wrapped(self, name, function):
        def call(*args, **kwargs):
            is_named = name == self._name
            is_first = is_named and self.num_calls[name] == self._at
            self.num_calls[name] += 1
            goes_on = self.num_raised and (is_named or self._anything)
            if self.num_raised < self._times and (is_first or goes_on):
                self.num_raised += 1
                if self._when == "after":
                    function(*args, **kwargs)
                raise self._error(f"{name} is at fault")
            return function(*args, **kwargs)

        return call
