"""The two halves of the side channel, without peers."""

from __future__ import annotations

import pytest

from tests.unit.transfer.interest_table import P1, D
from tests.unit.transfer.offer_table import P


@pytest.fixture
def p() -> P:
    return P()


@pytest.fixture
def d() -> D:
    return D(P1)
