"""The paper's claims beside what the experiments found, and a verdict on each.

A rule is fixed for each claim before anything runs, and said with it. Where it is not met, `note`
says what differs, as far as that is known.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

VERDICTS = ("reproduced", "differs", "not comparable")
Results = dict[str, Any]
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    """A figure of the paper beside ours."""

    what: str
    paper: str
    ours: str
    rule: str  # when it counts as reproduced
    holds: bool | None  # None: what ran here cannot decide it
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return "not comparable"
        return "reproduced" if self.holds else "differs"


def within(value: float, target: float, percent: float) -> bool:
    return abs(value / target - 1) <= percent / 100


def figure(value: float | None, unit: str = "") -> str:
    return "none" if value is None else f"{value:.3g}{unit}"


def chosen(rows: Rows, **wanted: object) -> Rows:
    """The rows that have these values; a text is matched by its beginning."""

    def matches(value: object, want: object) -> bool:
        if isinstance(want, str) and isinstance(value, str):
            return value == want or value.startswith(f"{want}_")
        return value == want

    return [row for row in rows if all(matches(row[k], want) for k, want in wanted.items())]


def rising(values: Iterable[float | None]) -> bool:
    """Whether each value is there and above the one before."""
    found = list(values)
    known = [value for value in found if value is not None]
    return len(known) == len(found) and all(a < b for a, b in pairwise(known))
