"""D's half of the side channel: finding prefill instances, and asking them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import BootstrapError, IncompatiblePeerError, TransferTimeoutError
from sgl_pd_connector.transfer.interest import RESUBSCRIBE, Interest
from sgl_pd_connector.transfer.interests import LOOKUP_REPEAT, LOOKUP_RETRY
from sgl_pd_connector.wire import messages as msg
from tests.unit.transfer.interest_table import (
    LIMITS,
    P1,
    P1_AGAIN,
    P2,
    STATES,
    D,
    asking,
    error_of,
    in_every_asked_state,
    in_every_state,
    promised,
    pulling,
    ready,
)

pytestmark = pytest.mark.unit


@in_every_state
def test_what_a_receiver_polls(d: D, state: Callable[[D], Interest]) -> None:
    assert state(d).life.state is STATES[state]


def test_p_is_looked_up_and_asked_by_its_epoch(d: D) -> None:
    d.want()
    assert len(d.look_ups) == 1
    d.answer_look_ups()
    assert d.sent == [
        (
            P1,
            msg.Subscribe(
                room=7, attempt=1, prompt=b"prompt", epoch=11, instance_id="decode-0", layout_digest="digest"
            ),
        )
    ]


def test_while_nobody_is_registered_the_look_up_is_repeated(d: D) -> None:
    d.registered = []
    interest = d.want()
    d.answer_look_ups()
    d.pass_time(5)
    assert not interest.life.is_final
    d.registered = [P1]
    d.now += LOOKUP_RETRY
    d.do(d.table.tick(d.now))
    d.answer_look_ups()
    assert len(d.messages(msg.Subscribe)) == 1


def test_a_look_up_is_not_repeated_before_it_is_answered(d: D) -> None:
    d.want()
    for _ in range(100):
        d.now += 0.1
        d.do(d.table.tick(d.now))
    assert len(d.look_ups) == 1


@pytest.mark.parametrize(
    ("registered", "cause"), [([], "none is registered"), (BootstrapError("connection refused"), "refused")]
)
def test_without_any_p_the_request_ends_with_the_cause(d: D, registered: Any, cause: str) -> None:
    d.registered = registered
    interest = d.want()
    d.answer_look_ups()
    d.pass_time(LIMITS.bootstrap_timeout)
    assert not interest.life.is_final
    d.pass_time(1)
    assert isinstance(interest.life.error, TransferTimeoutError)
    assert cause in error_of(interest)
    assert "boot:8998" in error_of(interest)
    assert "bootstrap_timeout = 30" in error_of(interest)
    assert d.ended == [interest]


def test_a_look_up_that_never_returns_has_the_same_deadline(d: D) -> None:
    interest = d.want()
    d.look_ups.clear()
    d.pass_time(LIMITS.bootstrap_timeout + 1)
    assert "bootstrap_timeout" in error_of(interest)
    assert "boot:8998: it has not answered" in error_of(interest)
    d.do(d.table.found(interest, [P1], d.now))
    assert d.sent == []


def test_that_the_only_p_was_restarted_is_said(d: D) -> None:
    interest = asking(d)
    d.told("restarted")
    d.pass_time(LIMITS.bootstrap_timeout + 1)
    assert "boot:8998: those registered there were restarted" in error_of(interest)


def test_an_incompatible_p_ends_the_request_at_once(d: D) -> None:
    d.registered = IncompatiblePeerError("page_size is 32 there and 16 here")
    interest = d.want()
    d.answer_look_ups()
    assert isinstance(interest.life.error, IncompatiblePeerError)
    assert "bootstrap server boot:8998: page_size is 32 there" in error_of(interest)
    assert d.ended == [interest]


def test_an_incompatible_p_at_a_later_look_up_does_not(d: D) -> None:
    interest = asking(d)
    d.registered = IncompatiblePeerError("page_size is 32 there and 16 here")
    d.pass_time(5, (P1, "no"))
    assert not interest.life.is_final


def test_subscribe_is_repeated_as_a_sign_of_life_until_the_end(d: D) -> None:
    interest = asking(d)
    d.pass_time(5, (P1, "yes"))
    assert len(d.messages(msg.Subscribe)) == pytest.approx(1 + 5 / RESUBSCRIBE, abs=1)
    d.ready()
    interest.life.advance(KVPoll.Transferring, d.now)
    before = len(d.messages(msg.Subscribe))
    d.pass_time(5)
    assert len(d.messages(msg.Subscribe)) == pytest.approx(before + 5 / RESUBSCRIBE, abs=1)
    interest.life.advance(KVPoll.Success, d.now)
    d.over(interest)
    before = len(d.messages(msg.Subscribe))
    d.pass_time(5)
    assert len(d.messages(msg.Subscribe)) == before


def test_once_p_has_it_nobody_else_is_looked_for(d: D) -> None:
    promised(d)
    d.registered = [P1, P2]
    d.pass_time(2 * LOOKUP_REPEAT, (P1, "yes"))
    assert d.messages(msg.Subscribe, P2) == []


def test_a_p_that_registers_later_is_asked_too(d: D) -> None:
    asking(d)
    d.registered = [P1, P2]
    d.pass_time(LOOKUP_REPEAT + 0.2, (P1, "no"))
    assert d.messages(msg.Subscribe, P2) != []
    d.ready(P2)
    assert d.endings() == [(P1, msg.Abort(room=7, attempt=1, reason="another instance has the room"))]


@in_every_asked_state
def test_a_p_that_falls_silent_is_dead(d: D, state: Callable[[D], Interest]) -> None:
    interest = state(d)
    d.pass_time(LIMITS.peer_timeout)
    assert not interest.life.is_final
    d.pass_time(1)
    assert isinstance(interest.life.error, TransferTimeoutError)
    assert "prefill-1 at 10.0.0.1:2 has not answered" in error_of(interest)
    assert "peer_timeout = 10" in error_of(interest)
    assert [(to, type(message)) for to, message in d.endings()] == [(P1, msg.Failed)]


@pytest.mark.parametrize("state", [ready, pulling])
def test_a_d_that_was_stopped_does_not_take_p_for_dead(d: D, state: Callable[[D], Interest]) -> None:
    interest = state(d)
    d.pass_time(3)
    d.now += 2 * LIMITS.peer_timeout
    d.pass_time(LIMITS.peer_timeout - 4)
    assert not interest.life.is_final
    d.pass_time(5)
    assert "has not answered" in error_of(interest)


@pytest.mark.parametrize("state", [ready, pulling])
def test_answers_that_came_while_d_was_stopped_do_not_count_twice(
    d: D, state: Callable[[D], Interest]
) -> None:
    interest = state(d)
    d.pass_time(3)
    d.now += 2.5 * LIMITS.peer_timeout
    d.told("yes")
    d.pass_time(LIMITS.peer_timeout + 1)
    assert "has not answered" in error_of(interest)


def test_the_one_that_has_the_request_is_missed_though_others_answer() -> None:
    d = D(P1, P2)
    interest = asking(d)
    d.pass_time(5, (P1, "yes"), (P2, "no"))
    d.pass_time(LIMITS.peer_timeout + 1, (P2, "no"))
    assert "prefill-1 at 10.0.0.1:2 has not answered" in error_of(interest)
    assert "prefill-2" not in error_of(interest)
    assert d.lost == [P1]


def test_of_several_one_that_answers_is_enough(d: D) -> None:
    d.registered = [P1, P2]
    interest = asking(d)
    d.pass_time(LIMITS.peer_timeout + 5, (P2, "yes"))
    assert not interest.life.is_final


def test_once_ready_only_the_p_that_has_it_counts(d: D) -> None:
    d.registered = [P1, P2]
    interest = asking(d)
    d.ready(P1)
    d.pass_time(LIMITS.peer_timeout + 1, (P2, "no"))
    assert "prefill-1 at 10.0.0.1:2 has not answered" in error_of(interest)


@pytest.mark.parametrize(
    ("known", "hint"), [("no", "did the router send"), ("other_prompt", "tokenizer and chat template")]
)
def test_a_p_that_does_not_have_the_request(d: D, known: str, hint: str) -> None:
    interest = asking(d)
    d.pass_time(LIMITS.bootstrap_timeout, (P1, known))
    assert not interest.life.is_final
    d.pass_time(2, (P1, known))
    assert hint in error_of(interest)
    assert "bootstrap_timeout = 30" in error_of(interest)


def test_what_one_p_says_does_not_hide_what_another_said(d: D) -> None:
    d.registered = [P1, P2]
    interest = asking(d)
    d.pass_time(LIMITS.bootstrap_timeout + 2, (P1, "other_prompt"), (P2, "no"))
    assert "tokenizer and chat template" in error_of(interest)


def test_a_p_that_has_it_may_take_its_time(d: D) -> None:
    interest = asking(d)
    d.pass_time(LIMITS.prefill_timeout, (P1, "yes"))
    assert not interest.life.is_final
    d.pass_time(1, (P1, "yes"))
    assert "prefill_timeout = 600" in error_of(interest)


# What is known from before.


def test_a_p_that_is_known_is_asked_before_the_look_up_is_answered(d: D) -> None:
    interest = d.want()
    d.do(d.table.suggest(interest, [P1], d.now))
    assert len(d.messages(msg.Subscribe, P1)) == 1
    d.answer_look_ups()
    assert len(d.messages(msg.Subscribe, P1)) == 1
    d.ready()
    assert interest.source is P1


def test_with_a_known_p_nothing_depends_on_the_bootstrap_server(d: D) -> None:
    d.registered = BootstrapError("connection refused")
    interest = d.want()
    d.do(d.table.suggest(interest, [P1], d.now))
    d.pass_time(2 * LIMITS.bootstrap_timeout, (P1, "yes"))
    d.ready()
    assert interest.life.state is KVPoll.WaitingForInput


def test_a_known_p_that_was_replaced_is_asked_beside_its_successor() -> None:
    d = D(P1_AGAIN)
    interest = d.want()
    d.do(d.table.suggest(interest, [P1], d.now))
    d.answer_look_ups()
    d.pass_time(LIMITS.peer_timeout + 5, (P1_AGAIN, "no"))
    assert not interest.life.is_final
    d.ready(P1_AGAIN)
    assert interest.source is P1_AGAIN


def test_nobody_is_sent_to_a_p_that_was_restarted(d: D) -> None:
    asking(d)
    d.told("restarted")
    assert d.lost == [P1]


def test_nobody_is_sent_to_a_p_that_is_silent() -> None:
    d = D(P1, P2)
    asking(d)
    d.pass_time(LIMITS.peer_timeout + 1, (P2, "yes"))
    assert d.lost == [], "one that does not answer is no news as long as another does"
    d.pass_time(LIMITS.peer_timeout + 1)
    assert set(d.lost) == {P1, P2}
