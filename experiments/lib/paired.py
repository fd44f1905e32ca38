"""Ways to do the same thing, timed in turn, so that a noisy machine slows all of them."""

from collections.abc import Iterator, Sequence

import numpy as np


def in_turn[T](ways: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """(round, way) for each way in each round; another way goes first each time."""
    for number in range(rounds):
        first = number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            yield number, way


def ratio_spread(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the rounds' ratios."""
    low, median, high = np.quantile(np.divide(over, under), [0.25, 0.5, 0.75])
    return float(low), float(median), float(high)
