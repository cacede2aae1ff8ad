"""P's half of the side channel: what ends by itself, and what ends when P stops."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sgl_pd_connector.errors import TransferTimeoutError
from sgl_pd_connector.transfer import offers
from sgl_pd_connector.transfer.offers import Offer
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.rooms import RoomKey
from tests.unit.transfer.offer_table import (
    D2,
    EPOCH,
    LIMITS,
    P,
    asked,
    in_every_claimed_state,
    offered,
    only,
    unasked,
)

pytestmark = pytest.mark.unit


@in_every_claimed_state
def test_a_d_that_falls_silent_loses_its_lease(p: P, state: Callable[[P], Offer]) -> None:
    offer = state(p)
    assert p.wait(LIMITS.lease) == []
    assert isinstance(only(p.wait(0.1)), msg.Failed)
    error = offer.life.failure_exception()
    assert isinstance(error, TransferTimeoutError)
    assert "decode-0" in str(error)
    assert "lease = 30" in str(error)
    p.assert_nothing_is_held()
    assert p.wait(1) == []
    assert p.ended == [offer]


@in_every_claimed_state
def test_every_subscribe_renews_the_lease(p: P, state: Callable[[P], Offer]) -> None:
    offer = state(p)
    for _ in range(5):
        p.wait(LIMITS.lease)
        p.subscribe()
    assert not offer.life.is_final


def test_a_copy_that_nobody_asks_for_is_kept_for_one_lease(p: P) -> None:
    offer = p.add()
    p.wait(100)
    p.pack(offer)
    p.wait(LIMITS.lease)
    assert not offer.life.is_final
    assert p.wait(0.1) == []
    assert "lease = 30" in str(offer.life.failure_exception())
    p.assert_nothing_is_held()


@pytest.mark.parametrize("state", [unasked, asked])
def test_a_prompt_that_is_not_prefilled_in_time(p: P, state: Callable[[P], Offer]) -> None:
    offer = state(p)
    subscribe_again = msg.Subscribe(
        room=7, attempt=1, prompt=b"prompt", epoch=EPOCH, instance_id="d", layout_digest="digest"
    )
    for _ in range(60):
        p.wait(10)
        p.hear(subscribe_again)
    assert not offer.life.is_final
    p.wait(0.1)
    assert "prefill_timeout = 600" in str(offer.life.failure_exception())


def test_a_prompt_that_finds_no_room_to_be_copied_to_was_prefilled(p: P) -> None:
    offer = p.add()
    offer.sent_at = p.now
    for _ in range(60):
        p.subscribe()
        p.wait(10)
    assert not offer.life.is_final
    p.wait(0.1)
    text = str(offer.life.failure_exception())
    assert "not prefilled" not in text
    assert "no room in max_packed_bytes" in text
    assert "prefill_timeout = 600" in text


def test_a_prompt_that_nobody_asks_for_waits_for_room_no_longer_than_a_copy_would(p: P) -> None:
    offer = p.add()
    offer.sent_at = p.now
    p.wait(LIMITS.lease)
    assert not offer.life.is_final
    p.wait(0.1)
    assert "no decode instance has asked for it" in str(offer.life.failure_exception())


def test_a_d_that_is_alive_but_never_fetches(p: P) -> None:
    offer = offered(p)
    for _ in range(66):
        p.wait(10)
        p.subscribe()
    assert not offer.life.is_final
    assert isinstance(only(p.wait(0.1)), msg.Failed)
    assert "prefill_timeout + transfer_timeout = 660" in str(offer.life.failure_exception())
    p.assert_nothing_is_held()


def test_a_d_that_asked_in_vain_is_forgotten_after_a_lease(p: P) -> None:
    p.subscribe()
    p.wait(LIMITS.lease)
    assert p.table._waiting
    p.wait(0.1)
    assert p.table._waiting == {}
    assert p.table._waiting_key == {}


def test_a_flood_of_questions_is_bounded_and_loses_nobody(p: P, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "MAX_SUBSCRIPTIONS", 10)
    for attempt in range(100):
        assert only(p.subscribe(attempt=attempt, key=RoomKey(attempt, b""))).known == "no"
    assert len(p.table._waiting_key) == 10
    p.add(RoomKey(50, b""))
    assert only(p.subscribe(attempt=50, key=RoomKey(50, b""))).known == "yes"


def test_one_attempt_that_names_many_rooms_is_one_question(p: P) -> None:
    for room in range(100):
        p.subscribe(attempt=1, key=RoomKey(room, b""))
    assert len(p.table._waiting_key) == len(p.table._waiting) == 1


def test_when_p_stops_every_d_is_told_and_nothing_is_kept(p: P) -> None:
    p.add(RoomKey(1, b""))
    p.subscribe(attempt=2, key=RoomKey(2, b""))
    p.add(RoomKey(2, b""))
    p.pack(p.add(RoomKey(3, b"")))
    p.subscribe(attempt=4, key=RoomKey(4, b""))
    p.pack(p.add(RoomKey(4, b"")))
    p.subscribe(attempt=5, key=RoomKey(5, b""), peer=D2)
    told = p.do(p.table.close("stopping", p.now))
    assert {message.attempt for message in told} == {2, 4, 5}
    assert {type(message) for message in told} == {msg.Abort}
    assert len(p.ended) == 4
    p.assert_nothing_is_held()
    assert p.do(p.table.close("stopping", p.now)) == []
