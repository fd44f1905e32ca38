"""The time of iterations in flight: the device works on one after the other."""

from types import SimpleNamespace

from paged_jax.executor import pending
from paged_jax.executor.pending import PendingSteps


def test_the_time_behind_another_iteration_counts_from_when_its_tokens_were_back(monkeypatch):
    now = iter([5.0, 7.0, 9.5])
    monkeypatch.setattr(pending, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    first = PendingSteps([], None, list, start_s=1.0)
    behind = PendingSteps([], None, list, start_s=2.0, after=first)
    late = PendingSteps([], None, list, start_s=9.0, after=behind)  # the device had nothing to do
    assert [each.result().device_s for each in (first, behind, late)] == [4.0, 2.0, 0.5]


def test_an_iteration_that_is_back_keeps_nothing_of_those_before():
    """Else each would keep the arrays of all that ever ran."""
    first = PendingSteps([], None, list, start_s=0.0)
    behind = PendingSteps([], None, list, start_s=0.0, after=first)
    first.result()
    behind.result()
    assert behind._after is None
