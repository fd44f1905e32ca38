"""What became of requests that were not served to their end, and why."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from experiments.serving.driver import ServedRequest

Outcome = tuple[str, str]  # what happened, why


def outcome(served: ServedRequest) -> Outcome | None:
    """None for a request that was served to its end; the reason may be empty."""
    if served.output is None:
        return "refused", served.refusal or ""
    if served.output.error is not None:
        return "failed", served.output.error
    reasons = {out.finish_reason for out in served.output.outputs}
    if "timeout" in reasons:
        return "timed out", "its deadline passed"
    if reasons & {"abort", "error"}:
        return "cut short", " and ".join(sorted(map(str, reasons)))
    return None


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
