"""Comparing a result with the result that is wanted, entry by entry."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Wanted:
    """A result in float64, how far each entry may be off, and the dtype that is wanted."""

    value: np.ndarray
    bound: np.ndarray | float  # >= 0
    dtype: np.dtype


class Difference(NamedTuple):
    """The entry that is furthest off, relative to its bound."""

    excess: float  # error / bound: above 1 is a fault
    error: float | None  # None: not finite, as for a NaN
    bound: float | None
    fault: str = ""  # in words


def compare(name: str, actual: np.ndarray, wanted: Wanted) -> Difference:
    """Compare a result with the wanted one. NaN and infinity must stand where they are wanted."""
    if actual.shape != wanted.value.shape or actual.dtype != wanted.dtype:
        found, due = (
            f"{x.dtype}{list(y.shape)}" for x, y in ((actual, actual), (wanted, wanted.value))
        )
        return Difference(np.inf, None, None, f"{name} is {found}, must be {due}")
    values = actual.astype(np.float64)
    bound = np.broadcast_to(wanted.bound, values.shape)
    equal = (values == wanted.value) | (np.isnan(values) & np.isnan(wanted.value))
    error = np.abs(np.subtract(values, wanted.value, out=np.zeros_like(values), where=~equal))
    with np.errstate(divide="ignore"):
        excess = np.divide(error, bound, out=np.zeros_like(error), where=error > 0)
    excess[np.isnan(error)] = np.inf
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    fault = ""
    if excess[worst] > 1:
        fault = (
            f"{name}{list(map(int, worst))} is {values[worst]:.6g}, must be "
            f"{wanted.value[worst]:.6g} to within {bound[worst]:.2g}; "
            f"{(excess > 1).sum()} of {excess.size} entries are wrong"
        )
    if not np.isfinite(error[worst]):
        return Difference(np.inf, None, None, fault)
    return Difference(float(excess[worst]), float(error[worst]), float(bound[worst]), fault)
