"""D's half of the side channel: every event in every state of an interest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import (
    BootstrapError,
    IncompatiblePeerError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)
from sgl_pd_connector.transfer.interests import (
    LOOKUP_REPEAT,
    LOOKUP_RETRY,
    RESUBSCRIBE,
    Action,
    Interest,
    InterestTable,
    LookUp,
    PeerRoute,
    Send,
    Timeouts,
)
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.transport import Peer
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.rooms import RoomKey

pytestmark = pytest.mark.unit

LIMITS = Timeouts(bootstrap_timeout=30.0, peer_timeout=10.0, prefill_timeout=600.0, transfer_timeout=60.0)
P1 = PeerRoute(Peer("prefill-1", 11, "10.0.0.1:1"), "10.0.0.1:2")
P2 = PeerRoute(Peer("prefill-2", 22, "10.0.0.2:1"), "10.0.0.2:2")
P1_AGAIN = PeerRoute(Peer("prefill-1", 12, "10.0.0.1:7"), "10.0.0.1:8")


class D:
    """A table, with a clock that is moved by hand; `registered` is what the bootstrap server answers."""

    def __init__(self, *registered: PeerRoute) -> None:
        self.now = 1000.0
        self.registered: list[PeerRoute] | BootstrapError | IncompatiblePeerError = list(registered)
        self.look_ups: list[Interest] = []
        self.sent: list[tuple[PeerRoute, msg.Message]] = []
        self.ended: list[Interest] = []
        self.refuse: Exception | None = None
        self.table = InterestTable(
            timeouts=LIMITS,
            instance_id="decode-0",
            layout_digest="digest",
            check=self._check,
            ended=self.ended.append,
        )

    def _check(self, interest: Interest, ready: msg.Ready) -> None:
        if self.refuse is not None:
            raise self.refuse

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case LookUp(interest):
                    self.look_ups.append(interest)
                case Send(route, message):
                    assert msg.decode(msg.encode(message)) == message
                    self.sent.append((route, message))

    def want(self, room: int = 7, attempt: int = 1) -> Interest:
        interest = Interest(RoomKey(room, b"prompt"), 20, "boot:8998", attempt, Lifecycle(self.now))
        self.do(self.table.add(interest, self.now))
        return interest

    def answer_look_ups(self) -> None:
        asked, self.look_ups = self.look_ups, []
        for interest in asked:
            if isinstance(self.registered, list):
                self.do(self.table.found(interest, self.registered, self.now))
            else:
                self.do(self.table.not_found(interest, self.registered, self.now))

    def hear(self, message: msg.Message, route: PeerRoute = P1) -> None:
        self.do(self.table.on_message(route, message, self.now))

    def told(self, known: Any, route: PeerRoute = P1, attempt: int = 1) -> None:
        self.hear(msg.Wait(room=7, attempt=attempt, known=known), route)

    def ready(self, route: PeerRoute = P1, **fields: Any) -> None:
        fields = {"room": 7, "attempt": 1, "num_tokens": 20} | fields
        chunk = msg.ReadyChunk(uuid=1, first=0, pages=1)
        self.hear(msg.Ready(layout={}, groups={1: [1]}, chunks=[chunk], **fields), route)

    def over(self, interest: Interest) -> None:
        self.do(self.table.over(interest, self.now))

    def pass_time(self, seconds: float, *alive: tuple[PeerRoute, str]) -> None:
        """Ticks eight times a second (exact in binary); the instances named answer once a second."""
        end = self.now + seconds
        while self.now < end:
            for route, known in alive:
                self.told(known, route)
            for _ in range(8):
                self.now += 0.125
                self.do(self.table.tick(self.now))
                self.answer_look_ups()

    def messages(self, kind: type[Any], route: PeerRoute | None = None) -> list[Any]:
        return [m for to, m in self.sent if isinstance(m, kind) and route in (None, to)]

    def endings(self) -> list[tuple[PeerRoute, msg.Message]]:
        return [(to, m) for to, m in self.sent if not isinstance(m, msg.Subscribe)]


def looking(d: D) -> Interest:
    return d.want()


def asking(d: D) -> Interest:
    interest = d.want()
    d.answer_look_ups()
    return interest


def promised(d: D) -> Interest:
    interest = asking(d)
    d.told("yes")
    return interest


def ready(d: D) -> Interest:
    interest = promised(d)
    d.ready()
    return interest


def pulling(d: D) -> Interest:
    interest = ready(d)
    assert interest.life.advance(KVPoll.Transferring, d.now)
    return interest


def pulled(d: D) -> Interest:
    interest = pulling(d)
    interest.pulled_at = d.now
    return interest


STATES: dict[Callable[[D], Interest], KVPoll] = {
    looking: KVPoll.Bootstrapping,
    asking: KVPoll.Bootstrapping,
    promised: KVPoll.Bootstrapping,
    ready: KVPoll.WaitingForInput,
    pulling: KVPoll.Transferring,
}
ASKED = [asking, promised, ready, pulling]
in_every_state = pytest.mark.parametrize("state", STATES)
in_every_asked_state = pytest.mark.parametrize("state", ASKED)


@pytest.fixture
def d() -> D:
    return D(P1)


def error_of(interest: Interest) -> str:
    return str(interest.life.failure_exception())


@in_every_state
def test_what_a_receiver_polls(d: D, state: Callable[[D], Interest]) -> None:
    assert state(d).life.state is STATES[state]


# Finding P.


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
    d.do(d.table.found(interest, [P1], d.now))
    assert d.sent == []


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


# Asking P.


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


# READY.


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


# P's own end.


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


# This side's end.


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
    sent = len(d.sent)
    d.pass_time(5)
    assert len(d.sent) == sent
    assert d.ended == [interest]


@pytest.mark.parametrize("state", [looking, asking])
def test_an_abort_does_not_wait_for_ever(d: D, state: Callable[[D], Interest]) -> None:
    leave(d, state(d))
    d.pass_time(LIMITS.bootstrap_timeout + 1, (P1, "no"))
    assert d.endings() == [(P1, GONE)]
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


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes in whatever order: every end is reported once, to the manager and to each P that was asked."""

    routes = st.sampled_from([P1, P2])
    attempts = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.d = D(P1, P2)
        self.all: dict[int, Interest] = {}

    @rule(attempt=attempts)
    def want(self, attempt: int) -> None:
        if attempt not in self.all:
            self.all[attempt] = self.d.want(attempt=attempt)

    @rule(registered=st.sampled_from([[], [P1], [P1, P2], [P1_AGAIN], BootstrapError("down")]))
    def look_up(self, registered: Any) -> None:
        self.d.registered = registered
        self.d.answer_look_ups()

    @rule(attempt=attempts, route=routes, known=st.sampled_from(["yes", "no", "other_prompt", "restarted"]))
    def told(self, attempt: int, route: PeerRoute, known: str) -> None:
        self.d.told(known, route, attempt)

    @rule(attempt=attempts, route=routes)
    def ready(self, attempt: int, route: PeerRoute) -> None:
        self.d.ready(route, attempt=attempt)

    @rule(attempt=attempts, route=routes, kind=st.sampled_from([msg.Failed, msg.Abort]))
    def given_up(self, attempt: int, route: PeerRoute, kind: Any) -> None:
        self.d.hear(kind(room=7, attempt=attempt, reason="x"), route)

    @rule(attempt=attempts, report=st.booleans())
    def pulled(self, attempt: int, report: bool) -> None:
        interest = self.all.get(attempt)
        if interest is not None and interest.life.state is KVPoll.WaitingForInput:
            interest.life.advance(KVPoll.Transferring, self.d.now)
            interest.life.advance(KVPoll.Success, self.d.now)
            if report:
                self.d.over(interest)

    @rule(attempt=attempts, report=st.booleans())
    def abort(self, attempt: int, report: bool) -> None:
        interest = self.all.get(attempt)
        if interest is not None and interest.life.fail(TransferAbortedError("gone"), self.d.now) and report:
            self.d.over(interest)

    @rule(seconds=st.sampled_from([0.1, 1.0, 11.0, 31.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.d.now += seconds
        self.d.do(self.d.table.tick(self.d.now))

    @invariant()
    def it_adds_up(self) -> None:
        assert len(self.d.ended) == len(set(map(id, self.d.ended)))
        assert all(interest.life.is_final for interest in self.d.ended)
        assert len(self.d.table) == len(self.all) - len(self.d.ended)
        ends = [(to, m.attempt) for to, m in self.d.endings()]
        assert len(ends) == len(set(ends)), "nobody is told twice"

    def teardown(self) -> None:
        self.d.do(self.d.table.close("stopping", self.d.now))
        assert len(self.d.ended) == len(self.all)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
