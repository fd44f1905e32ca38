"""Two ways to do the same thing, timed in turn, so that a noisy machine slows both."""

from collections.abc import Iterator, Sequence

import numpy as np


def in_turn[T](first: T, second: T, rounds: int) -> Iterator[tuple[int, T]]:
    """(round, way) for each of the two in each round; the way that goes first alternates."""
    for number in range(rounds):
        for way in (first, second) if number % 2 == 0 else (second, first):
            yield number, way


def ratio_spread(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the rounds' ratios."""
    low, median, high = np.quantile(np.divide(over, under), [0.25, 0.5, 0.75])
    return float(low), float(median), float(high)
