"""The paper's claims beside what the experiments found, and a verdict on each.

A rule is fixed for each claim before anything runs, and said with it. Where it is not met, `note`
says what differs, as far as that is known.
"""

from collections.abc import Callable, Iterable
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
    rule: str = ""  # when it counts as reproduced
    holds: bool | None = None  # None: what ran here cannot decide it
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.holds is None:
            return "not comparable"
        return "reproduced" if self.holds else "differs"


@dataclass(frozen=True)
class Rule:
    """When a value found here counts as the paper's."""

    text: str
    is_met: Callable[[Any], bool]


def claim(
    what: str, *, paper: str, found: Any, rule: Rule, ours: str | None = None, note: str = ""
) -> Claim:
    """A claim that the rule decides by the value `found`, which differs where it is None.

    ours: how the value is shown; by default as `figure`.
    """
    holds = found is not None and rule.is_met(found)
    return Claim(what, paper, figure(found) if ours is None else ours, rule.text, holds, note)


# Rules; `more` ends their text.


def at_least(low: float, more: str = "") -> Rule:
    return Rule(f"at least {low:g}{more}", lambda found: found >= low)


def at_most(high: float, more: str = "") -> Rule:
    return Rule(f"at most {high:g}{more}", lambda found: found <= high)


def above(low: float, more: str = "") -> Rule:
    return Rule(f"above {low:g}{more}", lambda found: found > low)


def within_percent(percent: float, target: float) -> Rule:
    return Rule(f"within {percent:g} %", lambda found: within(found, target, percent))


def within_points(points: float, low: float, high: float | None = None) -> Rule:
    """Points of a percentage, around a value or a range."""
    least, most = low - points, (low if high is None else high) + points
    return Rule(f"within {points:g} points", lambda found: least <= found <= most)


def in_order(text: str = "the same order") -> Rule:
    return Rule(text, rising)


# What claims are made of


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
