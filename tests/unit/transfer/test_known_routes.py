"""Prefill instances stay known when their bootstrap server does not."""

from __future__ import annotations

import pytest

from sgl_pd_connector.transfer import known_routes
from sgl_pd_connector.transfer.known_routes import FRESH, KnownRoutes
from tests.unit.transfer.interest_table import P1, P1_AGAIN, P2

pytestmark = pytest.mark.unit

PATIENCE = 15.0
BOOT = "boot:8998"


@pytest.fixture
def known() -> KnownRoutes:
    return KnownRoutes(PATIENCE)


def test_what_a_server_said_is_known_under_its_address(known: KnownRoutes) -> None:
    known.learn(BOOT, [P1, P2], 0.0)
    assert known.get(BOOT) == [P1, P2]
    assert known.get("other:8998") == []


def test_it_is_known_for_as_long_as_the_server_does_not_answer(known: KnownRoutes) -> None:
    known.learn(BOOT, [P1], 0.0)
    assert not known.is_fresh(BOOT, 1e9)
    assert known.get(BOOT) == [P1]


def test_a_server_that_was_restarted_makes_nobody_unknown_who_registers_again_in_time(
    known: KnownRoutes,
) -> None:
    known.learn(BOOT, [P1, P2], 0.0)
    known.learn(BOOT, [], 1e6)
    assert known.get(BOOT) == [P1, P2]
    known.learn(BOOT, [P2], 1e6 + 5)
    assert set(known.get(BOOT)) == {P1, P2}
    known.learn(BOOT, [P1, P2], 1e6 + 10)
    known.learn(BOOT, [P2], 1e6 + PATIENCE + 5)
    assert set(known.get(BOOT)) == {P1, P2}, "missing anew"


def test_who_is_missing_for_long_is_gone(known: KnownRoutes) -> None:
    known.learn(BOOT, [P1, P2], 0.0)
    known.learn(BOOT, [P2], 10.0)
    known.learn(BOOT, [P2], 10.0 + PATIENCE)
    assert known.get(BOOT) == [P2]


def test_a_successor_takes_the_place_at_once(known: KnownRoutes) -> None:
    known.learn(BOOT, [P1], 0.0)
    known.learn(BOOT, [P1_AGAIN], 1.0)
    assert known.get(BOOT) == [P1_AGAIN]


def test_who_turned_out_to_be_gone_is_forgotten_everywhere(known: KnownRoutes) -> None:
    known.learn(BOOT, [P1, P2], 0.0)
    known.learn("other:8998", [P1], 0.0)
    known.forget(P1)
    known.forget(P1_AGAIN)
    assert (known.get(BOOT), known.get("other:8998")) == ([P2], [])


def test_an_answer_is_fresh_for_a_moment_unless_it_was_nobody(known: KnownRoutes) -> None:
    assert not known.is_fresh(BOOT, 0.0)
    known.learn(BOOT, [P1], 0.0)
    assert known.is_fresh(BOOT, FRESH / 2)
    assert not known.is_fresh(BOOT, FRESH)
    known.learn("other:8998", [], 0.0)
    assert not known.is_fresh("other:8998", 0.0)


def test_the_number_of_servers_is_bounded(known: KnownRoutes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_routes, "MAX_SERVERS", 2)
    known.learn("a", [P1], 0.0)
    known.learn("b", [P1], 1.0)
    known.learn("a", [P1], 2.0)
    known.learn("c", [P1], 3.0)
    assert [name for name in "abc" if known.get(name)] == ["a", "c"]
