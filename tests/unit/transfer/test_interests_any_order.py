"""D's half of the side channel: every event in every state of an interest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import BootstrapError, TransferAbortedError
from sgl_pd_connector.transfer.interest import Interest, PeerRoute
from sgl_pd_connector.wire import messages as msg
from tests.unit.transfer.interest_table import P1, P1_AGAIN, P2, D

pytestmark = pytest.mark.unit


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

    @rule(attempt=attempts, route=routes, again=st.integers(0, 2))
    def ready(self, attempt: int, route: PeerRoute, again: int) -> None:
        self.d.ready(route, attempt=attempt, again=again)

    @rule(attempt=attempts)
    def offer_again(self, attempt: int) -> None:
        if attempt in self.all:
            self.d.do(self.d.table.offer_again(self.all[attempt], self.d.now))

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
        assert len(ends) == len(set(ends)), "nobody is told two things"

    def teardown(self) -> None:
        self.d.do(self.d.table.close("stopping", self.d.now))
        assert len(self.d.ended) == len(self.all)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
