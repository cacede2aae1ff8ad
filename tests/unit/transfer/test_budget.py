"""The limit on bytes held, and who may take what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pd_connector.transfer.budget import OVERTAKING, Admission, ByteBudget

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


LIMIT = 10


class Line:
    """Who asks for a budget of ten bytes, with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.budget = ByteBudget(LIMIT)
        self.admission = Admission(self.budget)
        self.held: dict[str, int] = {}

    def ask(self, owner: str, size: int) -> bool:
        taken = self.admission.take(owner, size, self.now, holds=owner in self.held)
        if taken:
            self.held[owner] = self.held.get(owner, 0) + size
        return taken

    def finish(self, owner: str) -> None:
        self.budget.give(self.held.pop(owner))


@pytest.fixture
def line() -> Line:
    return Line()


def test_what_fits_is_served_while_something_large_waits(line: Line) -> None:
    assert line.ask("small", 4)
    assert not line.ask("large", 8)
    assert line.ask("another small", 4)


def test_what_has_waited_for_too_long_is_overtaken_no_more(line: Line) -> None:
    line.ask("small 0", 4)
    assert not line.ask("large", 8)
    overtaken = 0
    for number in range(1, 100):
        line.now += 0.5
        if line.ask("large", 8):
            break
        if line.ask(f"small {number}", 4):
            overtaken += 1
        line.finish(f"small {number - 1}")
    assert line.held == {"large": 8}
    assert 0 < overtaken <= OVERTAKING / 0.5
    line.finish("large")
    assert line.ask("small again", 4)


def test_of_several_that_wait_the_one_that_came_first_is_served_first(line: Line) -> None:
    line.ask("small", 4)
    assert not line.ask("first", 9)
    line.now += 1
    assert not line.ask("second", 9)
    line.finish("small")
    line.now += OVERTAKING
    assert not line.ask("second", 9)
    assert line.ask("first", 9)
    line.finish("first")
    assert line.ask("second", 9)


def test_one_larger_than_the_limit_gets_its_turn_too(line: Line) -> None:
    line.ask("small", 1)
    assert not line.ask("huge", LIMIT + 1)
    line.now += OVERTAKING
    assert not line.ask("another small", 1)
    line.finish("small")
    assert line.ask("huge", LIMIT + 1)


def test_one_that_is_being_served_holds_up_nobody(line: Line) -> None:
    """Its peer may have stalled, and then it waits for what it holds itself."""
    line.ask("stalled", 6)
    assert not line.ask("stalled", 6)
    line.now += 10 * OVERTAKING
    assert line.ask("other", 4)


def test_one_that_left_holds_up_nobody(line: Line) -> None:
    line.ask("small", 4)
    assert not line.ask("large", 8)
    line.now += OVERTAKING
    assert not line.ask("another small", 4)
    line.admission.leave("large")
    line.admission.leave("large")
    assert line.ask("another small", 4)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.booleans()), max_size=60))
def test_everybody_is_served_in_the_end(steps: list[tuple[int, int, bool]]) -> None:
    line = Line()
    wanted: dict[str, int] = {}
    for owner, size, finishes in steps:
        line.now += 1
        name = str(owner)
        if finishes and name in line.held:
            line.finish(name)
        elif name not in line.held and line.ask(name, wanted.setdefault(name, size)):
            del wanted[name]
    for _ in range(len(wanted)):
        for name in list(line.held):
            line.finish(name)
        line.now += OVERTAKING
        for name, size in list(wanted.items()):
            if line.ask(name, size):
                del wanted[name]
    assert not wanted
