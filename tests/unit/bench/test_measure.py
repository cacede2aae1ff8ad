"""The arithmetic of measurements: a planted slowdown is seen, drift of the machine is not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from sgl_pd_connector.bench.measure import Comparison, compare, quantile, slope

pytestmark = pytest.mark.unit


def drifting(clock: Callable[[], float], cost: float) -> Callable[[], float]:
    """A system whose cost is ``cost`` times what the machine takes for one at the moment."""
    return lambda: cost * clock()


def test_a_planted_slowdown_is_seen_through_a_drifting_machine() -> None:
    # The machine gets ten times slower over the run, which is far more than the 20 % that are planted.
    calls = itertools.count()
    clock = lambda: 1.0 + next(calls) * 0.05  # noqa: E731
    found = compare({"new": drifting(clock, 1.2), "old": drifting(clock, 1.0)}, rounds=101)
    assert found.ratio("new", to="old") == pytest.approx(1 / 1.2, rel=0.05)


def test_one_outlier_changes_no_ratio() -> None:
    found = Comparison({"a": [1.0, 1.0, 100.0], "b": [2.0, 2.0, 2.0]})
    assert found.ratio("a", to="b") == 2.0
    assert found.median("a") == 1.0


def test_systems_take_turns_in_an_order_that_turns_too() -> None:
    order: list[str] = []

    def system(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return 1.0

        return run

    found = compare({name: system(name) for name in "abc"}, rounds=3, warmup=0)
    assert "".join(order) == "abcbcacab"
    assert found.rounds == 3


def test_warm_up_rounds_do_not_count() -> None:
    times = iter([50.0, 1.0, 1.0])
    assert compare({"a": lambda: next(times)}, rounds=2, warmup=1).seconds == {"a": [1.0, 1.0]}


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_the_slope_tells_linear_from_quadratic(exponent: float) -> None:
    sizes = [100.0, 1000.0, 10_000.0]
    assert slope(sizes, [3.0 * size**exponent for size in sizes]) == pytest.approx(exponent)


def test_a_slope_needs_two_sizes() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        slope([1.0], [1.0])


def test_quantiles_interpolate() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [quantile(values, q) for q in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]
    assert math.isclose(quantile(values, 0.99), 3.97)
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
