"""P's half of the side channel: every event in every state of an offer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import PDError, TransferAbortedError, TransferError, TransferTimeoutError
from sgl_pd_connector.transfer import offers
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.offers import (
    Action,
    Offer,
    OfferTable,
    PackedChunk,
    Register,
    Release,
    Reply,
    Timeouts,
)
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.chunks import Chunk
from sgl_pd_connector.wire.rooms import RoomKey

pytestmark = pytest.mark.unit

KEY = RoomKey(7, b"prompt")
OTHER_PROMPT = RoomKey(7, b"another")
LIMITS = Timeouts(lease=30.0, prefill_timeout=600.0, transfer_timeout=60.0)
D1, D2 = "d1's socket", "d2's socket"
SIZE = 100
EPOCH = 5


class P:
    """A table whose actions are carried out on dictionaries, with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sent: list[tuple[Any, msg.Message]] = []
        self.registered: dict[int, Offer] = {}
        self.held = 0
        self.ended: list[Offer] = []
        uuids = itertools.count(1)
        self.table = OfferTable(
            timeouts=LIMITS,
            epoch=EPOCH,
            layout_digest="digest",
            ready=self._ready,
            new_uuid=lambda: next(uuids),
            ended=self.ended.append,
        )

    @staticmethod
    def _ready(offer: Offer, uuids: Any) -> msg.Ready:
        assert offer.attempt is not None
        chunks = [msg.ReadyChunk(uuid=uuid, first=i, pages=1) for i, uuid in enumerate(uuids)]
        return msg.Ready(
            room=offer.key.room,
            attempt=offer.attempt,
            num_tokens=offer.num_tokens,
            layout={},
            groups={},
            chunks=chunks,
        )

    def do(self, actions: list[Action]) -> list[msg.Message]:
        """Carries actions out and returns the messages among them."""
        messages: list[msg.Message] = []
        for action in actions:
            match action:
                case Reply(peer, message):
                    self.sent.append((peer, message))
                    messages.append(message)
                case Register(offer):
                    assert offer.packed is not None
                    assert len(offer.uuids) == len(offer.packed)
                    assert not self.registered.keys() & set(offer.uuids), "a uuid is used once"
                    self.registered |= dict.fromkeys(offer.uuids, offer)
                case Release(uuids, packed_bytes):
                    for uuid in uuids:
                        del self.registered[uuid]
                    self.held -= packed_bytes
                    assert self.held >= 0, "bytes are given back once"
        return messages

    def add(self, key: RoomKey = KEY) -> Offer:
        offer = Offer(key, 20, Lifecycle(self.now))
        self.do(self.table.add(offer, self.now))
        return offer

    def pack(self, offer: Offer) -> list[msg.Message]:
        self.held += SIZE
        chunks = [PackedChunk(Chunk(0, 1), ["a"]), PackedChunk(Chunk(1, 1), ["b"])]
        return self.do(self.table.packed(offer, chunks, SIZE, self.now))

    def subscribe(
        self, attempt: int = 1, key: RoomKey = KEY, peer: Any = D1, **fields: Any
    ) -> list[msg.Message]:
        fields = {"epoch": EPOCH, "instance_id": "decode-0", "layout_digest": "digest"} | fields
        message = msg.Subscribe(room=key.room, attempt=attempt, prompt=key.prompt, **fields)
        return self.do(self.table.on_message(peer, message, self.now))

    def hear(self, message: msg.Message, peer: Any = D1) -> list[msg.Message]:
        return self.do(self.table.on_message(peer, message, self.now))

    def done(self, attempt: int = 1) -> list[msg.Message]:
        return self.hear(msg.Done(room=7, attempt=attempt))

    def wait(self, seconds: float) -> list[msg.Message]:
        self.now += seconds
        return self.do(self.table.tick(self.now))

    def assert_nothing_is_held(self) -> None:
        assert (len(self.table), self.table.registered_bytes, self.held, self.registered) == (0, 0, 0, {})


@pytest.fixture
def p() -> P:
    return P()


def unasked(p: P) -> Offer:
    return p.add()


def asked(p: P) -> Offer:
    offer = p.add()
    p.subscribe()
    return offer


def packed(p: P) -> Offer:
    offer = p.add()
    p.pack(offer)
    return offer


def offered(p: P) -> Offer:
    offer = asked(p)
    p.pack(offer)
    return offer


# Every state of an offer that is not over, and what a sender in it polls.
STATES: dict[Callable[[P], Offer], KVPoll] = {
    unasked: KVPoll.Bootstrapping,
    packed: KVPoll.Bootstrapping,
    asked: KVPoll.WaitingForInput,
    offered: KVPoll.Transferring,
}
CLAIMED = [asked, offered]
in_every_state = pytest.mark.parametrize("state", STATES)
in_every_claimed_state = pytest.mark.parametrize("state", CLAIMED)


def only(messages: list[msg.Message]) -> Any:
    assert len(messages) == 1
    return messages[0]


@in_every_state
def test_what_a_sender_polls(p: P, state: Callable[[P], Offer]) -> None:
    assert state(p).life.state is STATES[state]


# How P and D meet.


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


# How an offer ends.


def test_done_is_success_and_frees_everything(p: P) -> None:
    offer = offered(p)
    assert p.table.registered_bytes == SIZE
    assert p.done() == []
    assert offer.life.state is KVPoll.Success
    assert p.ended == [offer]
    p.assert_nothing_is_held()


def test_a_second_done_is_harmless(p: P) -> None:
    offer = offered(p)
    p.done()
    p.done()
    assert p.ended == [offer]


@pytest.mark.parametrize("state", [unasked, packed, asked])
def test_a_done_before_ready_is_ignored(p: P, state: Callable[[P], Offer]) -> None:
    offer = state(p)
    assert p.done() == []
    assert offer.life.state is STATES[state]


@in_every_state
@pytest.mark.parametrize("message", [msg.Done, msg.Failed, msg.Abort])
@pytest.mark.parametrize(("room", "attempt"), [(7, 99), (8, 1)])
def test_messages_of_another_attempt_or_room_are_ignored(
    p: P, state: Callable[[P], Offer], message: Any, room: int, attempt: int
) -> None:
    offer = state(p)
    fields = {} if message is msg.Done else {"reason": "x"}
    assert p.hear(message(room=room, attempt=attempt, **fields)) == []
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
def test_what_d_gives_up_is_over_and_d_is_not_told(
    p: P, state: Callable[[P], Offer], message: Any, kind: type[PDError]
) -> None:
    offer = state(p)
    assert p.hear(message) == []
    error = offer.life.failure_exception()
    assert type(error) is kind
    assert message.reason in str(error)
    assert "decode-0" in str(error)
    assert p.ended == [offer]
    p.assert_nothing_is_held()
    assert p.hear(message) == []
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
    monkeypatch.setattr(offers, "MAX_ENDED_UNASKED", 3)
    for room in range(10):
        p.do(p.table.abort(p.add(RoomKey(room, b"")), "prompt too long", p.now))
    p.wait(0)
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


# Deadlines.


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


# Stopping.


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


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes in whatever order: bytes are given back once, and every end is reported once."""

    rooms = st.integers(0, 2)
    attempts = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.p = P()
        self.all: list[Offer] = []

    def any_offer(self, data: st.DataObject) -> Offer | None:
        return data.draw(st.sampled_from(self.all)) if self.all else None

    @rule(room=rooms)
    def add(self, room: int) -> None:
        self.all.append(self.p.add(RoomKey(room, b"")))

    @rule(data=st.data())
    def pack(self, data: st.DataObject) -> None:
        offer = self.any_offer(data)
        if offer is not None and offer.packed is None:
            self.p.pack(offer)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        offer = self.any_offer(data)
        if offer is not None:
            self.p.do(self.p.table.abort(offer, "gone", self.p.now))

    @rule(room=rooms, attempt=attempts)
    def subscribe(self, room: int, attempt: int) -> None:
        self.p.subscribe(attempt=attempt, key=RoomKey(room, b""))

    @rule(room=rooms, attempt=attempts)
    def done(self, room: int, attempt: int) -> None:
        self.p.hear(msg.Done(room=room, attempt=attempt))

    @rule(room=rooms, attempt=attempts)
    def fail(self, room: int, attempt: int) -> None:
        self.p.hear(msg.Failed(room=room, attempt=attempt, reason="x"))

    @rule(seconds=st.sampled_from([0.1, 29.0, 31.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.p.wait(seconds)

    @invariant()
    def it_adds_up(self) -> None:
        over = [offer for offer in self.all if offer.life.is_final]
        assert sorted(map(id, self.p.ended)) == sorted(map(id, over))
        alive = [offer for offer in self.all if not offer.life.is_final]
        assert len(self.p.table) == len(alive)
        assert self.p.held == SIZE * sum(offer.packed is not None for offer in alive)
        assert self.p.table.registered_bytes == SIZE * len(
            {id(offer) for offer in self.p.registered.values()}
        )
        assert all(not offer.life.is_final for offer in self.p.registered.values())

    def teardown(self) -> None:
        self.p.do(self.p.table.close("stopping", self.p.now))
        self.p.assert_nothing_is_held()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
