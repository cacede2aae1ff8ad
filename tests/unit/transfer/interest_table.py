"""An `InterestTable` whose clock, look-ups and peers are a test's, and interests in every state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import BootstrapError, IncompatiblePeerError
from sgl_pd_connector.transfer.interest import Action, Interest, LookUp, Lost, PeerRoute, Send
from sgl_pd_connector.transfer.interests import InterestTable, Timeouts
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.transport import Peer
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.rooms import RoomKey

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
        self.lost: list[PeerRoute] = []
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
                case Lost(route):
                    self.lost.append(route)
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
        chunk = msg.ReadyChunk(uuid=1 + fields.get("again", 0), first=0, pages=1)
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
        """What was said to end a request, without repetitions."""
        return list(dict.fromkeys((to, m) for to, m in self.sent if not isinstance(m, msg.Subscribe)))


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


def error_of(interest: Interest) -> str:
    return str(interest.life.failure_exception())
