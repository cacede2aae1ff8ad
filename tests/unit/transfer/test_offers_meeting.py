"""P's half of the side channel: how an offer and a D meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.transfer.offers import Offer, PackedChunk, Register, Reply
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.chunks import Chunk
from sgl_pd_connector.wire.rooms import RoomKey
from tests.unit.transfer.offer_table import (
    D1,
    D2,
    EPOCH,
    KEY,
    OTHER_PROMPT,
    STATES,
    P,
    asked,
    in_every_state,
    only,
    packed,
)

pytestmark = pytest.mark.unit


@in_every_state
def test_what_a_sender_polls(p: P, state: Callable[[P], Offer]) -> None:
    assert state(p).life.state is STATES[state]


def test_d_asks_first(p: P) -> None:
    assert only(p.subscribe()) == msg.Wait(room=7, attempt=1, known="no")
    offer = p.add()
    assert p.sent[-1] == (D1, msg.Wait(room=7, attempt=1, known="yes"))
    assert offer.life.state is KVPoll.WaitingForInput
    assert isinstance(only(p.pack(offer)), msg.Ready)


def test_the_request_comes_first(p: P) -> None:
    offer = p.add()
    assert p.sent == []
    assert only(p.subscribe()) == msg.Wait(room=7, attempt=1, known="yes")
    assert isinstance(only(p.pack(offer)), msg.Ready)


def test_the_prompt_is_prefilled_before_d_asks(p: P) -> None:
    offer = packed(p)
    assert p.registered == {}, "without a D nothing is registered"
    ready = only(p.subscribe())
    assert isinstance(ready, msg.Ready)
    assert offer.life.state is KVPoll.Transferring
    assert [chunk.uuid for chunk in ready.chunks] == list(p.registered)


def test_buffers_are_registered_before_d_hears_of_them(p: P) -> None:
    offer = asked(p)
    kinds = [type(action) for action in p.table.packed(offer, [PackedChunk(Chunk(0, 1), [])], 0, p.now)]
    assert kinds == [Register, Reply]


def test_a_repeated_subscribe_is_answered_again_with_the_same_uuids(p: P) -> None:
    asked(p)
    assert only(p.subscribe()).known == "yes"
    p.pack(only(list(p.table._offers())))
    again, and_again = only(p.subscribe()), only(p.subscribe())
    assert isinstance(again, msg.Ready)
    assert again == and_again
    assert len(p.registered) == 2


def test_an_attempt_is_for_one_room(p: P) -> None:
    offer = asked(p)
    other = p.add(RoomKey(8, b""))
    assert p.subscribe(key=RoomKey(8, b"")) == []
    assert (offer.attempt, other.attempt) == (1, None)


def test_after_a_new_connection_d_is_answered_there(p: P) -> None:
    offer = asked(p)
    p.subscribe(peer=D2)
    p.pack(offer)
    assert p.sent[-1][0] == D2


def test_a_room_with_another_prompt_is_told_from_an_unknown_one(p: P) -> None:
    p.add(OTHER_PROMPT)
    assert only(p.subscribe(attempt=1, key=KEY)).known == "other_prompt"
    assert only(p.subscribe(attempt=2, key=RoomKey(8, b"another"))).known == "no"


def test_prompts_of_one_room_are_told_apart(p: P) -> None:
    first, second = p.add(KEY), p.add(OTHER_PROMPT)
    p.subscribe(attempt=2, key=OTHER_PROMPT)
    assert (first.attempt, second.attempt) == (None, 2)


def test_equal_prompts_of_one_room_are_each_claimed_once(p: P) -> None:
    twins = [p.add(), p.add()]
    assert only(p.subscribe(attempt=1)).known == "yes"
    assert only(p.subscribe(attempt=2)).known == "yes"
    assert only(p.subscribe(attempt=3)).known == "other_prompt"
    assert {twin.attempt for twin in twins} == {1, 2}
    third = p.add()
    assert third.attempt == 3


def test_a_request_goes_to_the_d_that_was_heard_last(p: P) -> None:
    p.subscribe(attempt=1)  # by a D that dies
    p.now += 5
    p.subscribe(attempt=2)
    assert p.add().attempt == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 99}, "version 99"),
        ({"layout_digest": "other"}, "digest other of decode instance decode-0 at d1's socket"),
    ],
)
def test_a_d_that_does_not_fit_is_refused_with_the_reason(p: P, fields: dict[str, Any], reason: str) -> None:
    offer = packed(p)
    refusal = only(p.subscribe(**fields))
    assert isinstance(refusal, msg.Failed)
    assert reason in refusal.reason
    assert offer.attempt is None


def test_a_d_that_means_an_earlier_start_of_p_is_told(p: P) -> None:
    offer = packed(p)
    assert only(p.subscribe(epoch=EPOCH - 1)).known == "restarted"
    assert offer.attempt is None
    assert p.table._waiting == {}
