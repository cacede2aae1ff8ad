"""D's half of the side channel: either side ends a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import TransferAbortedError, TransferError
from sgl_pd_connector.transfer.interest import Interest
from sgl_pd_connector.transfer.interests import LOOKUP_REPEAT
from sgl_pd_connector.wire import messages as msg
from tests.unit.transfer.interest_table import (
    LIMITS,
    P1,
    P1_AGAIN,
    P2,
    D,
    asking,
    error_of,
    in_every_asked_state,
    looking,
    promised,
    pulling,
    ready,
)

pytestmark = pytest.mark.unit


@in_every_asked_state
@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (msg.Failed(room=7, attempt=1, reason="no memory"), TransferError),
        (msg.Abort(room=7, attempt=1, reason="client gone"), TransferAbortedError),
    ],
)
def test_what_p_gives_up_is_over_with_its_reason_and_p_is_not_told_back(
    d: D, state: Callable[[D], Interest], message: Any, kind: type
) -> None:
    interest = state(d)
    d.hear(message)
    assert type(interest.life.failure_exception()) is kind
    assert message.reason in error_of(interest)
    assert "prefill-1" in error_of(interest)
    assert d.endings() == []
    assert d.ended == [interest]


def test_one_of_several_that_stops_does_not_end_a_request_that_another_may_have(d: D) -> None:
    d.registered = [P1, P2]
    interest = asking(d)
    d.hear(msg.Abort(room=7, attempt=1, reason="this prefill instance is stopping"), P1)
    assert not interest.life.is_final
    d.pass_time(2 * LOOKUP_REPEAT, (P2, "no"))
    assert len(d.messages(msg.Subscribe, P1)) == 1, "one that refused is not asked again"
    d.ready(P2)
    assert interest.life.state is KVPoll.WaitingForInput


def test_one_of_several_that_had_the_request_ends_it_and_the_others_are_told(d: D) -> None:
    d.registered = [P1, P2]
    interest = asking(d)
    d.told("yes", P1)
    d.hear(msg.Failed(room=7, attempt=1, reason="no memory"), P1)
    assert "no memory" in error_of(interest)
    assert [(to, type(message)) for to, message in d.endings()] == [(P2, msg.Failed)]


def test_the_last_that_refuses_ends_the_request(d: D) -> None:
    d.registered = [P1, P2]
    interest = asking(d)
    d.hear(msg.Failed(room=7, attempt=1, reason="first"), P1)
    d.hear(msg.Failed(room=7, attempt=1, reason="second"), P2)
    assert "second" in error_of(interest)


def test_a_restarted_p_is_looked_up_again_and_asked_by_its_new_epoch(d: D) -> None:
    interest = asking(d)
    d.told("restarted")
    d.registered = [P1_AGAIN]
    d.pass_time(1)
    assert [m.epoch for m in d.messages(msg.Subscribe)] == [11, 12]
    d.ready(P1_AGAIN)
    assert interest.source is P1_AGAIN


@pytest.mark.parametrize("state", [promised, ready, pulling])
@pytest.mark.parametrize("known", ["no", "other_prompt", "restarted"])
def test_a_p_that_no_longer_has_what_it_had_ends_the_request(
    d: D, state: Callable[[D], Interest], known: str
) -> None:
    interest = state(d)
    d.told(known)
    assert "prefill-1 at 10.0.0.1:2 no longer has the request" in error_of(interest)
    assert d.ended == [interest]


GONE = msg.Abort(room=7, attempt=1, reason="client gone")


def leave(d: D, interest: Interest) -> None:
    interest.life.fail(TransferAbortedError("client gone"), d.now)
    d.over(interest)
    d.over(interest)


@pytest.mark.parametrize("state", [promised, ready, pulling])
def test_an_abort_is_told_at_once_to_a_p_that_knows_the_request(d: D, state: Callable[[D], Interest]) -> None:
    interest = state(d)
    leave(d, interest)
    assert d.endings() == [(P1, GONE)]
    d.pass_time(1)
    assert d.endings() == [(P1, GONE)]
    assert d.ended == [interest]
    assert len(d.table) == 0


@pytest.mark.parametrize("state", [looking, asking])
@pytest.mark.parametrize("answer", ["yes", "ready"])
def test_an_abort_waits_for_a_p_that_does_not_know_the_request_yet(
    d: D, state: Callable[[D], Interest], answer: str
) -> None:
    """P would take an ABORT of an attempt it never heard of for nothing, and keep a copy for nobody."""
    interest = state(d)
    leave(d, interest)
    assert d.ended == [interest]
    assert len(d.table) == 0
    d.pass_time(3, (P1, "no"))
    assert d.endings() == []
    if answer == "ready":
        d.ready()
    else:
        d.told("yes")
    assert d.endings() == [(P1, GONE)]
    d.told("no")
    sent = len(d.sent)
    d.pass_time(5)
    assert len(d.sent) == sent
    assert d.ended == [interest]


@pytest.mark.parametrize("state", [looking, asking])
def test_an_abort_does_not_wait_for_ever(d: D, state: Callable[[D], Interest]) -> None:
    leave(d, state(d))
    d.pass_time(LIMITS.bootstrap_timeout + 1, (P1, "no"))
    assert d.endings() == [(P1, GONE)]
    d.told("no")
    sent = len(d.sent)
    d.pass_time(5)
    assert len(d.sent) == sent


def test_a_p_that_failed_the_request_itself_needs_no_abort(d: D) -> None:
    leave(d, asking(d))
    d.hear(msg.Failed(room=7, attempt=1, reason="too long"))
    d.pass_time(5, (P1, "yes"))
    assert d.endings() == []


def test_a_server_that_stops_says_so_without_waiting(d: D) -> None:
    leave(d, asking(d))
    d.do(d.table.close("stopping", d.now))
    assert d.endings() == [(P1, GONE)]


def test_an_end_that_nobody_reported_is_found_by_the_clock(d: D) -> None:
    interest = pulling(d)
    interest.life.fail(TransferError("pull failed"), d.now)
    d.pass_time(1)
    assert d.endings() == [(P1, msg.Failed(room=7, attempt=1, reason="pull failed"))]
    assert d.ended == [interest]


def test_success_is_told_once(d: D) -> None:
    interest = pulling(d)
    interest.life.advance(KVPoll.Success, d.now)
    d.over(interest)
    d.over(interest)
    assert d.endings() == [(P1, msg.Done(room=7, attempt=1))]
    d.hear(msg.Failed(room=7, attempt=1, reason="too late"))
    assert interest.life.state is KVPoll.Success


def test_an_error_of_any_length_can_be_told(d: D) -> None:
    interest = asking(d)
    interest.life.fail(TransferError("x" * 5000), d.now)
    d.over(interest)
    assert len(d.messages(msg.Failed)[0].reason) == 2000


def test_when_d_stops_every_p_is_told_and_nothing_is_kept(d: D) -> None:
    d.registered = [P1, P2]
    first = d.want(attempt=1)
    d.answer_look_ups()
    d.ready(P1)
    second = d.want(attempt=2)
    d.answer_look_ups()
    third = d.want(attempt=3)
    d.do(d.table.close("stopping", d.now))
    told = [(to, m.attempt) for to, m in d.endings() if "stopping" in getattr(m, "reason", "")]
    assert told == [(P1, 1), (P1, 2), (P2, 2)]
    assert d.ended == [first, second, third]
    assert len(d.table) == 0
