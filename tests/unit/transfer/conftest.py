"""The two halves of the side channel and D's pulls, without peers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.transfer.interest_table import P1, D
from tests.unit.transfer.offer_table import P
from tests.unit.transfer.pulls import Pulls


@pytest.fixture
def p() -> P:
    return P()


@pytest.fixture
def d() -> D:
    return D(P1)


@pytest.fixture
def pulls() -> Iterator[Pulls]:
    pulls = Pulls()
    yield pulls
    pulls.executor.close()
    assert pulls.budget.held == 0
    assert pulls.executor.in_flight == 0
