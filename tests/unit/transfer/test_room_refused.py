"""D's server refused an HTTP request: P, which may have prefilled it, is not to keep anything of its room."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import TransferAbortedError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.interest import Interest
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.offers import Offer
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.rooms import RoomKey
from tests.unit.transfer.interest_table import LIMITS, P1, P2, D
from tests.unit.transfer.offer_table import D2, EPOCH, OTHER_PROMPT, P, offered, only, packed, unasked
from tests.unit.transfer.offer_table import LIMITS as P_LIMITS

pytestmark = pytest.mark.unit

REFUSED = msg.Abort(room=7, attempt=9, reason="refused", whole_room=True)


def refuse(d: D) -> Interest:
    life = Lifecycle(d.now)
    life.fail(reasons.given_up(7, "", "refused"), d.now)
    interest = Interest(RoomKey(7, b""), None, "boot:8998", 9, life, whole_room=True)
    d.do(d.table.refused(interest, d.now))
    return interest


@pytest.mark.parametrize("state", [unasked, packed])
def test_p_ends_what_no_d_has_asked_for(p: P, state: Callable[[P], Offer]) -> None:
    offer, other = state(p), p.add(OTHER_PROMPT)
    assert only(p.hear(REFUSED)) == msg.Wait(room=7, attempt=9, known="no")
    for ended in (offer, other):
        assert isinstance(ended.life.failure_exception(), TransferAbortedError)
        assert "the decode instance at d1's socket gave up: refused" in str(ended.life.error)
    p.assert_nothing_is_held()


def test_p_keeps_what_a_d_has_asked_for_and_other_rooms(p: P) -> None:
    offer, elsewhere = offered(p), p.add(RoomKey(8, b"prompt"))
    p.hear(REFUSED, D2)
    assert offer.life.state is KVPoll.Transferring
    assert elsewhere.life.state is KVPoll.Bootstrapping


def test_what_reaches_p_after_the_refusal_is_ended_at_once(p: P) -> None:
    """As the later ones of a list of prompts do."""
    unasked(p)
    p.hear(REFUSED)
    late, elsewhere = p.add(OTHER_PROMPT), p.add(RoomKey(8, b"prompt"))
    assert "the decode instance at d1's socket gave up: refused" in str(late.life.failure_exception())
    p.pack(late)
    assert not elsewhere.life.is_final
    assert (len(p.table), p.held) == (1, 0)


def test_a_refusal_is_remembered_for_one_lease(p: P) -> None:
    p.hear(REFUSED)
    p.wait(P_LIMITS.lease)
    assert p.add().life.is_final
    p.wait(0.1)
    assert not p.add().life.is_final


def test_a_refusal_does_not_hurt_a_d_that_has_asked(p: P) -> None:
    p.subscribe(attempt=2, key=OTHER_PROMPT)
    claimed = offered(p)
    p.hear(REFUSED, D2)
    met = p.add(OTHER_PROMPT)
    assert (claimed.life.state, met.life.state) == (KVPoll.Transferring, KVPoll.WaitingForInput)
    assert (claimed.attempt, met.attempt) == (1, 2)
    p.done()
    assert claimed.life.state is KVPoll.Success


def test_a_d_that_asks_nevertheless_is_told_why(p: P) -> None:
    packed(p)
    p.hear(REFUSED)
    _, said = p.subscribe(attempt=2)
    assert isinstance(said, msg.Abort)
    assert "refused" in said.reason


@pytest.mark.parametrize("known", ["other_prompt", "yes"])
def test_d_waits_until_p_knows_the_room(d: D, known: str) -> None:
    refuse(d)
    d.pass_time(3)
    assert d.endings() == []
    d.told("no", attempt=9)
    assert d.endings() == []
    d.told(known, attempt=9)
    [(to, said)] = d.endings()
    assert isinstance(said, msg.Abort)
    assert (to, said.whole_room, said.attempt) == (P1, True, 9)
    d.told("no", attempt=9)
    sent = len(d.sent)
    d.pass_time(5)
    assert len(d.sent) == sent
    assert d.ended == [], "no transfer of the engine's"


def test_d_does_not_wait_for_ever() -> None:
    d = D(P1, P2)
    refuse(d)
    d.pass_time(LIMITS.bootstrap_timeout + LIMITS.peer_timeout + 2)
    assert {to for to, _ in d.endings()} == {P1, P2}
    sent = len(d.sent)
    d.pass_time(5)
    assert len(d.sent) == sent


def test_an_ordinary_abort_does_not_take_another_prompt_for_its_own(d: D) -> None:
    interest = d.want()
    d.answer_look_ups()
    interest.life.fail(TransferAbortedError("client gone"), d.now)
    d.over(interest)
    d.told("other_prompt")
    assert d.endings() == []


def test_both_together(p: P, d: D) -> None:
    offer = packed(p)
    refuse(d)
    for _ in range(3):
        d.pass_time(1)
        sent, d.sent[:] = [message for _, message in d.sent], []
        for message in sent:
            # The two tables' examples do not agree on P's epoch.
            for answer in p.hear(message.model_copy(update={"epoch": EPOCH})):
                d.hear(answer)
    assert "refused" in str(offer.life.failure_exception())
    assert d.sent == []
    p.assert_nothing_is_held()
