"""Arithmetic of measurements on noisy machines: alternate, take pairs, report medians."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile, 0 <= q <= 1, by linear interpolation between order statistics."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Comparison:
    """What was measured for one case, by system, in rounds: the n-th values of all systems belong together.

    A shared machine's speed drifts by more than the differences of interest. Within one round it hardly does, so ratios
    are taken within rounds and their median is what counts.
    """

    seconds: Mapping[str, Sequence[float]]

    def median(self, system: str) -> float:
        return statistics.median(self.seconds[system])

    def ratio(self, system: str, to: str) -> float:
        """Median over the rounds of ``to``'s time divided by ``system``'s: above 1 means that ``system`` is faster."""
        pairs = zip(self.seconds[to], self.seconds[system], strict=True)
        return statistics.median(other / own for other, own in pairs)

    @property
    def rounds(self) -> int:
        return min(map(len, self.seconds.values()))


def compare(systems: Mapping[str, Callable[[], float]], *, rounds: int, warmup: int = 1) -> Comparison:
    """Runs every system once per round, in an order that turns by one each round.

    Args:
        systems: by name, a function that does the work once and returns the seconds it took.
        rounds: counted ones.
        warmup: rounds before them that are not counted.
    """
    names = list(systems)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-warmup, rounds):
        turn = round_number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = systems[name]()
            if round_number >= 0:
                seconds[name].append(taken)
    return Comparison(seconds)


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent b of cost ~ size**b, fitted by least squares in logarithms: 1 is linear, 2 quadratic."""
    if len(sizes) < 2 or len(sizes) != len(costs):
        raise ValueError("at least two sizes, with a cost each")
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    fit = statistics.linear_regression(xs, ys)
    return fit.slope
