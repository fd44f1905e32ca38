"""Records of a file: one that cannot be used costs itself alone, and is counted and named."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAMED = 3  # reasons that a note names, and places of each

type Placed[T] = tuple[str, T]  # where in the file a record is, as in "line 3", and the record


@dataclass
class Skipped:
    """The records of a file that are skipped. `usable` adds to it as it is read to its end."""

    path: str | Path
    count: int = 0
    _reasons: dict[str, tuple[str, list[str]]] = field(default_factory=dict)  # first, and places

    def add(self, place: str, error: Exception | str) -> None:
        """A record is skipped."""
        reason = " ".join(str(error).split()) or type(error).__name__
        # The same slip with another value is no reason of its own.
        kind = re.sub(r"\d+", "", reason.split(", got ")[0])
        self._reasons.setdefault(kind, (reason, []))[1].append(place)
        self.count += 1

    def usable[R, T](
        self, records: Iterable[Placed[R]], parse: Callable[[R], T]
    ) -> Iterator[Placed[T]]:
        """What `parse` makes of each record; one for which it raises ValueError is skipped."""
        for place, record in records:
            try:
                parsed = parse(record)
            except (ValueError, OverflowError, RecursionError) as error:
                self.add(place, error)
            else:
                yield place, parsed

    def finish[T](self, records: Iterable[Placed[T]]) -> tuple[list[T], list[str]]:
        """The records without their places, and a note on what was skipped, if anything was.

        ValueError, with the first reasons, where no record is left.
        """
        kept = [record for _, record in records]
        if not kept:
            raise ValueError(f"{self.path}: no usable record{f': {self}' if self.count else ''}")
        total = self.count + len(kept)
        return kept, [f"skipped {self.count} of {total} records: {self}"] if self.count else []

    def __str__(self) -> str:
        """The commonest reasons, each with the places where it was met first."""
        reasons = sorted(self._reasons.values(), key=lambda reason: -len(reason[1]))
        told = [f"{reason} ({_listed(places)})" for reason, places in reasons[:NAMED]]
        if others := sum(len(places) for _, places in reasons[NAMED:]):
            told.append(f"{others} for other reasons")
        return "; ".join(told)


def _listed(places: list[str]) -> str:
    more = len(places) - NAMED
    return ", ".join(places[:NAMED]) + (f" and {more} more" if more > 0 else "")
