"""The limit on bytes held."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pd_connector.transfer.budget import ByteBudget

pytestmark = pytest.mark.unit


def test_what_does_not_fit_waits_until_something_is_given_back() -> None:
    budget = ByteBudget(10)
    assert budget.take(6)
    assert budget.take(4)
    assert not budget.take(1)
    budget.give(4)
    assert budget.take(1)
    assert budget.held == 7


def test_an_item_larger_than_the_limit_is_taken_when_nothing_else_is() -> None:
    budget = ByteBudget(10)
    assert budget.take(1)
    assert not budget.take(11)
    budget.give(1)
    assert budget.take(11)
    assert not budget.take(1)


def test_giving_back_more_than_is_held_is_a_bug() -> None:
    budget = ByteBudget(10)
    budget.take(3)
    with pytest.raises(AssertionError, match="4 bytes to a budget that holds 3"):
        budget.give(4)
    assert budget.held == 3


@given(st.lists(st.integers(0, 12), max_size=30))
def test_the_limit_is_kept_by_any_order_of_items(sizes: list[int]) -> None:
    budget = ByteBudget(10)
    taken: list[int] = []
    for size in sizes:
        while not budget.take(size):
            budget.give(taken.pop())
        taken.append(size)
        assert budget.held == sum(taken)
        assert budget.held <= 10 or [n for n in taken if n] == [size]
