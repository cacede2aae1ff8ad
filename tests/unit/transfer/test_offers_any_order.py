"""P's half of the side channel: every event in every state of an offer."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_pd_connector.transfer.offers import Offer
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.rooms import RoomKey
from tests.unit.transfer.offer_table import SIZE, P

pytestmark = pytest.mark.unit


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

    @rule(room=rooms, attempt=attempts, again=st.integers(0, 2))
    def subscribe(self, room: int, attempt: int, again: int) -> None:
        self.p.subscribe(attempt=attempt, key=RoomKey(room, b""), again=again)

    @rule(room=rooms, attempt=attempts)
    def done(self, room: int, attempt: int) -> None:
        self.p.hear(msg.Done(room=room, attempt=attempt))

    @rule(room=rooms, attempt=attempts)
    def fail(self, room: int, attempt: int) -> None:
        self.p.hear(msg.Failed(room=room, attempt=attempt, reason="x"))

    @rule(room=rooms, attempt=attempts)
    def refuse_the_room(self, room: int, attempt: int) -> None:
        self.p.hear(msg.Abort(room=room, attempt=attempt, reason="x", whole_room=True))

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
