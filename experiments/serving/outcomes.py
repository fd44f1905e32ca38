"""What became of requests that were not served to their end, and why."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from experiments.serving.driver import ServedRequest
from paged_jax.scheduling.request import CUT_SHORT

Outcome = tuple[str, str]  # what happened, why


def outcome(served: ServedRequest) -> Outcome | None:
    """None for a request that was served to its end; the reason may be empty."""
    if served.output is None:
        return "refused", served.refusal or ""
    if served.output.error is not None:
        return "failed", served.output.error
    reason = served.output.finish_reason  # also if it was a sample that is not among the outputs
    if reason == "timeout":
        return "timed out", "its deadline passed"
    return ("cut short", reason) if reason in CUT_SHORT else None


def shortfalls(requests: Iterable[ServedRequest]) -> list[dict[str, str | int]]:
    """What went wrong, how often, most frequent first.

    Reasons that differ in numbers alone count as one, which is given as it was first.
    """
    counts: Counter[Outcome] = Counter()
    first: dict[Outcome, Outcome] = {}
    for what, why in _outcomes(requests):
        kind = what, re.sub(r"\d+(\.\d+)?|'[^']*'", "#", why)
        counts[kind] += 1
        first.setdefault(kind, (what, why))
    return [
        {"what": first[kind][0], "why": first[kind][1], "requests": count}
        for kind, count in counts.most_common()
    ]


def _outcomes(requests: Iterable[ServedRequest]) -> Iterator[Outcome]:
    for served in requests:
        found = outcome(served)
        if found is not None:
            yield found
