"""Whether two runs gave the same outputs, and where they first differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.lib.driver import ServedRequest
from experiments.lib.serving_figures import outcome


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose outputs differ. `token` counts output tokens from 0."""

    request_id: str
    continuation: int | None  # None: one of the two was not served
    token: int | None  # None: the tokens are the same as far as both go, and neither goes on
    baseline: str
    candidate: str


def differences(
    baseline: Sequence[ServedRequest], candidate: Sequence[ServedRequest]
) -> Iterator[Difference]:
    """The first difference of each request that has one, in their order."""
    for before, after in zip(baseline, candidate, strict=True):
        difference = _difference(before, after)
        if difference is not None:
            yield difference


def _difference(before: ServedRequest, after: ServedRequest) -> Difference | None:
    request_id = before.request_id
    if before.output is None or after.output is None:
        if before.output is after.output:
            return None
        return Difference(request_id, None, None, _state(before), _state(after))
    pairs = zip(before.output.outputs, after.output.outputs, strict=True)
    for index, (one, other) in enumerate(pairs):
        at = first_difference(one.token_ids, other.token_ids)
        if at is not None:
            return Difference(
                request_id, index, at, _token(one.token_ids, at), _token(other.token_ids, at)
            )
        if one.finish_reason != other.finish_reason:
            return Difference(
                request_id, index, None, str(one.finish_reason), str(other.finish_reason)
            )
    return None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two sequences of tokens part, perhaps because one ends; None if they are equal."""
    for at, (token, other_token) in enumerate(zip(one, other, strict=False)):
        if token != other_token:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def _token(token_ids: Sequence[int], at: int) -> str:
    return str(token_ids[at]) if at < len(token_ids) else "(ended)"


def _state(served: ServedRequest) -> str:
    found = outcome(served)
    return "served" if found is None else ": ".join(filter(None, found))
