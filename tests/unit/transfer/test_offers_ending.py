"""P's half of the side channel: how an offer ends, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import PDError, TransferAbortedError, TransferError
from sgl_pd_connector.transfer import recent_errors
from sgl_pd_connector.transfer.offers import Action, Offer
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.rooms import RoomKey
from tests.unit.transfer.offer_table import (
    CLAIMED,
    LIMITS,
    OTHER_PROMPT,
    SIZE,
    STATES,
    P,
    asked,
    in_every_claimed_state,
    in_every_state,
    offered,
    only,
    packed,
    unasked,
)

pytestmark = pytest.mark.unit


def test_done_is_success_and_frees_everything(p: P) -> None:
    offer = offered(p)
    assert p.table.registered_bytes == SIZE
    assert only(p.done()).known == "no"
    assert offer.life.state is KVPoll.Success
    assert p.ended == [offer]
    p.assert_nothing_is_held()


def test_a_second_done_is_answered_like_the_first(p: P) -> None:
    offer = offered(p)
    assert p.done() == p.done()
    assert p.ended == [offer]


@pytest.mark.parametrize("state", [unasked, packed, asked])
def test_a_done_before_ready_is_ignored(p: P, state: Callable[[P], Offer]) -> None:
    offer = state(p)
    assert only(p.done()).known == ("yes" if offer.attempt is not None else "no")
    assert offer.life.state is STATES[state]


@in_every_state
@pytest.mark.parametrize("message", [msg.Done, msg.Failed, msg.Abort])
@pytest.mark.parametrize(("room", "attempt"), [(7, 99), (8, 1)])
def test_messages_of_another_attempt_or_room_change_nothing(
    p: P, state: Callable[[P], Offer], message: Any, room: int, attempt: int
) -> None:
    offer = state(p)
    fields = {} if message is msg.Done else {"reason": "x"}
    answer = msg.Wait(room=room, attempt=attempt, known="no")
    assert p.hear(message(room=room, attempt=attempt, **fields)) == [answer]
    assert offer.life.state is STATES[state]


@in_every_state
@pytest.mark.parametrize(
    "message",
    [
        msg.Wait(room=7, attempt=1, known="yes"),
        msg.Ready(
            room=7,
            attempt=1,
            num_tokens=1,
            layout={},
            groups={},
            chunks=[msg.ReadyChunk(uuid=1, first=0, pages=1)],
        ),
    ],
)
def test_what_only_p_says_is_ignored(p: P, state: Callable[[P], Offer], message: msg.Message) -> None:
    offer = state(p)
    assert p.hear(message) == []
    assert offer.life.state is STATES[state]


@in_every_claimed_state
@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (msg.Failed(room=7, attempt=1, reason="no memory"), TransferError),
        (msg.Abort(room=7, attempt=1, reason="client gone"), TransferAbortedError),
    ],
)
def test_what_d_gives_up_is_over_and_d_hears_only_that_it_is(
    p: P, state: Callable[[P], Offer], message: Any, kind: type[PDError]
) -> None:
    offer = state(p)
    assert only(p.hear(message)).known == "no"
    error = offer.life.failure_exception()
    assert type(error) is kind
    assert message.reason in str(error)
    assert "decode-0" in str(error)
    assert p.ended == [offer]
    p.assert_nothing_is_held()
    assert only(p.hear(message)).known == "no"
    assert p.ended == [offer]


def test_a_d_that_leaves_before_the_request_comes_is_not_met(p: P) -> None:
    p.subscribe()
    p.hear(msg.Abort(room=7, attempt=1, reason="client gone"))
    assert p.add().attempt is None


@in_every_state
@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (lambda p, offer: p.table.abort(offer, "client gone", p.now), msg.Abort),
        (lambda p, offer: p.table.fail(offer, TransferError("no memory"), p.now), msg.Failed),
    ],
)
def test_what_p_gives_up_is_over_and_d_is_told_once(
    p: P, state: Callable[[P], Offer], end: Callable[[P, Offer], list[Action]], kind: type
) -> None:
    offer = state(p)
    messages = p.do(end(p, offer))
    assert [type(message) for message in messages] == ([kind] if state in CLAIMED else [])
    assert offer.life.state is KVPoll.Failed
    assert p.ended == [offer]
    p.assert_nothing_is_held()
    assert p.do(end(p, offer)) == []
    assert p.ended == [offer]


@pytest.mark.parametrize("state", [unasked, packed])
def test_a_d_that_asks_after_the_end_hears_why(p: P, state: Callable[[P], Offer]) -> None:
    p.do(p.table.abort(state(p), "prompt too long", p.now))
    assert p.subscribe() == [
        msg.Wait(room=7, attempt=1, known="yes"),
        msg.Abort(
            room=7,
            attempt=1,
            reason="prompt too long (transfer given up before the other side was known)",
        ),
    ]
    assert only(p.subscribe(attempt=2, key=OTHER_PROMPT)).known == "no"


def test_a_request_that_is_tried_again_is_met(p: P) -> None:
    p.do(p.table.abort(p.add(), "preempted", p.now))
    p.add()
    assert only(p.subscribe()).known == "yes"
    assert only(p.subscribe(attempt=2)).known == "other_prompt", "the old reason is history"


def test_reasons_are_not_kept_for_ever(p: P, monkeypatch: pytest.MonkeyPatch) -> None:
    p.do(p.table.abort(p.add(), "prompt too long", p.now))
    p.wait(LIMITS.lease + 1)
    assert only(p.subscribe()).known == "no"
    monkeypatch.setattr(recent_errors, "MAX_KEPT", 3)
    for room in range(10):
        p.do(p.table.abort(p.add(RoomKey(room, b"")), "prompt too long", p.now))
    answers = [len(p.subscribe(attempt=100 + room, key=RoomKey(room, b""))) for room in range(10)]
    assert answers == [1] * 7 + [2] * 3


def test_a_reason_of_any_length_can_be_told(p: P) -> None:
    offer = asked(p)
    assert len(only(p.do(p.table.abort(offer, "x" * 5000, p.now))).reason) == 2000


def test_a_copy_that_comes_after_the_end_gives_its_bytes_back(p: P) -> None:
    offer = asked(p)
    p.do(p.table.abort(offer, "client gone", p.now))
    assert p.pack(offer) == []
    p.assert_nothing_is_held()
    assert p.ended == [offer]
