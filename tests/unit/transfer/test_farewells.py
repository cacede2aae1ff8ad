"""D's half of the side channel: the end of a request is repeated until P answers that it has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import TransferAbortedError, TransferError
from sgl_pd_connector.transfer.interest import RESUBSCRIBE, Interest
from sgl_pd_connector.wire import messages as msg
from tests.unit.transfer.interest_table import LIMITS, P1, P2, D, asking, promised, pulling
from tests.unit.transfer.offer_table import EPOCH, KEY, P, offered

pytestmark = pytest.mark.unit


def succeeded(d: D) -> Interest:
    interest = pulling(d)
    interest.life.advance(KVPoll.Success, d.now)
    d.over(interest)
    return interest


def failed(d: D) -> Interest:
    interest = pulling(d)
    interest.life.fail(TransferError("pull failed"), d.now)
    d.over(interest)
    return interest


def aborted(d: D) -> Interest:
    interest = promised(d)
    interest.life.fail(TransferAbortedError("client gone"), d.now)
    d.over(interest)
    return interest


ENDS: dict[Callable[[D], Interest], type[msg.Message]] = {
    succeeded: msg.Done,
    failed: msg.Failed,
    aborted: msg.Abort,
}
at_every_end = pytest.mark.parametrize("end", ENDS)


def assert_silent_from_now_on(d: D) -> None:
    sent = len(d.sent)
    d.pass_time(5)
    assert len(d.sent) == sent


@at_every_end
def test_it_is_told_at_once_and_repeated_until_p_answers(d: D, end: Callable[[D], Interest]) -> None:
    interest = end(d)
    assert len(d.messages(ENDS[end])) == 1
    assert len(d.table) == 0, "the engine waits for nothing"
    d.pass_time(3, (P1, "yes"))
    assert len(d.messages(ENDS[end])) == pytest.approx(1 + 3 / RESUBSCRIBE, abs=1)
    assert len(d.endings()) == 1
    subscribed = len(d.messages(msg.Subscribe))
    d.told("no")
    d.pass_time(3)
    assert len(d.messages(ENDS[end])) <= 1 + 3 / RESUBSCRIBE + 1
    assert len(d.messages(msg.Subscribe)) == subscribed
    assert d.ended == [interest]


@at_every_end
@pytest.mark.parametrize("answer", ["no", "other_prompt", "restarted"])
def test_a_p_that_has_none_is_told_no_more(d: D, end: Callable[[D], Interest], answer: str) -> None:
    end(d)
    d.told(answer)
    assert_silent_from_now_on(d)


@at_every_end
def test_a_p_that_ended_it_meanwhile_is_told_no_more(d: D, end: Callable[[D], Interest]) -> None:
    end(d)
    d.hear(msg.Failed(room=7, attempt=1, reason="lease"))
    assert_silent_from_now_on(d)


@at_every_end
def test_a_p_that_does_not_answer_is_left_alone(d: D, end: Callable[[D], Interest]) -> None:
    end(d)
    d.pass_time(LIMITS.peer_timeout + 1)
    assert_silent_from_now_on(d)


def test_of_several_each_is_told_until_it_answers_itself() -> None:
    d = D(P1, P2)
    interest = asking(d)
    interest.life.fail(TransferError("no memory"), d.now)
    d.over(interest)
    d.told("no", P1)
    before = len(d.messages(msg.Failed, P1))
    d.pass_time(3)
    assert len(d.messages(msg.Failed, P1)) == before
    assert len(d.messages(msg.Failed, P2)) > before
    d.told("no", P2)
    assert_silent_from_now_on(d)


def test_a_d_that_stops_keeps_nothing(d: D) -> None:
    succeeded(d)
    d.do(d.table.close("stopping", d.now))
    assert_silent_from_now_on(d)


def test_p_counts_a_success_although_the_first_done_was_lost(p: P, d: D) -> None:
    offer = offered(p)
    assert (EPOCH, KEY.room, KEY.prompt, offer.attempt) == (5, 7, b"prompt", 1)
    succeeded(d)
    lost, _ = d.messages(msg.Done), d.sent.clear()
    assert len(lost) == 1
    d.pass_time(RESUBSCRIBE)
    for done in d.messages(msg.Done):
        for answer in p.hear(done):
            d.hear(answer)
    assert offer.life.state is KVPoll.Success
    d.sent.clear()
    d.pass_time(5)
    assert d.sent == []
