"""D's half of the side channel: P says READY."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import IncompatiblePeerError, TransferAbortedError
from sgl_pd_connector.transfer.interest import Interest
from sgl_pd_connector.wire import messages as msg
from tests.unit.transfer.interest_table import P1, P2, D, asking, error_of, promised, pulled, pulling, ready

pytestmark = pytest.mark.unit


def test_ready_brings_the_plan(d: D) -> None:
    interest = ready(d)
    assert interest.source is P1
    assert interest.ready is not None
    assert interest.ready.num_tokens == 20


def test_a_repeated_ready_changes_nothing(d: D) -> None:
    interest = pulling(d)
    plan = interest.ready
    d.ready(num_tokens=99)
    assert interest.ready is plan
    assert interest.life.state is KVPoll.Transferring


def test_the_first_of_several_is_taken_and_the_others_are_told_once(d: D) -> None:
    d.registered = [P1, P2]
    interest = asking(d)
    d.ready(P2)
    d.ready(P1)
    assert interest.source is P2
    assert d.endings() == [(P1, msg.Abort(room=7, attempt=1, reason="another instance has the room"))]


@pytest.mark.parametrize("fields", [{"attempt": 2}, {"room": 8}, {"route": P2}])
def test_a_ready_of_another_attempt_room_or_instance_is_ignored(d: D, fields: dict[str, Any]) -> None:
    interest = asking(d)
    d.ready(**fields)
    assert interest.life.state is KVPoll.Bootstrapping
    assert interest.ready is None


def test_a_ready_that_does_not_fit_is_refused_and_p_is_told_why(d: D) -> None:
    d.refuse = IncompatiblePeerError("dtype")
    interest = asking(d)
    d.ready()
    assert interest.ready is None
    refusal = "offer of prefill instance prefill-1 at 10.0.0.1:2 refused: dtype"
    assert error_of(interest) == f"room 7: {refusal}"
    assert d.endings() == [(P1, msg.Failed(room=7, attempt=1, reason=refusal))]


def test_a_ready_for_an_aborted_request_changes_nothing(d: D) -> None:
    interest = promised(d)
    interest.life.fail(TransferAbortedError("client gone"), d.now)
    d.ready()
    assert interest.life.state is KVPoll.Failed
    d.over(interest)
    assert d.endings() == [(P1, msg.Abort(room=7, attempt=1, reason="client gone"))]


@pytest.mark.parametrize(
    ("state", "setting"),
    [
        (ready, "had no pages to write it into for 601.0 s (setting prefill_timeout = 600"),
        (pulling, "has arrived in 61.0 s (setting transfer_timeout = 60"),
        (pulled, "has not written it in 61.0 s (setting transfer_timeout = 60"),
    ],
)
def test_after_ready_every_state_has_a_deadline(d: D, state: Callable[[D], Interest], setting: str) -> None:
    interest = state(d)
    for _ in range(700):
        d.ready()  # P answers every SUBSCRIBE with it
        d.now += 1
        d.do(d.table.tick(d.now))
    assert setting in error_of(interest)
    assert [type(message) for _, message in d.endings()] == [msg.Failed]
