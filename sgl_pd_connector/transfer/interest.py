"""One request on D as its half of the side channel sees it, and what that half can ask to be done."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_pd_connector.errors import PDError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.transport import Peer
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.rooms import MAX_ROOM, RoomKey

RESUBSCRIBE = 1.0
"""Seconds between repetitions of SUBSCRIBE: D's sign of life, and the remedy for lost messages."""


def new_attempt() -> int:
    return secrets.randbelow(MAX_ROOM)


class PeerRoute(NamedTuple):
    """A prefill instance as the bootstrap server describes it."""

    peer: Peer
    zmq_addr: str

    def __str__(self) -> str:
        return reasons.prefill_instance(self.peer.instance_id, self.zmq_addr)


@dataclass
class Asked:
    """What is known of one P that was asked: when it was last heard, or first asked, and what it said of the room."""

    heard: float
    known: str = "no"


@dataclass(eq=False)
class Interest:
    """One receiver's side of the channel.

    Attributes:
        num_tokens: of the prompt; None until P has said it, if the engine did not.
        ready: the plan, once P said READY; the latest if it was asked to offer again.
        again: how often it was asked to.
        source: the P that did. From then on it is the only one in `asked`.
        asked: the instances that may have the request.
        crossed_out: those that said they have not, for good.
        known_at: when one of them last said that it has it; before that, when the first was asked.
        looked_up: whether the bootstrap server has answered.
        whole_room: it stands for an HTTP request that was refused, of which no prompt is known.
        pages, nbytes: pages to write, and bytes of the chunks they are in, once that is known.
        pulled_at: when all of it had arrived.
    """

    key: RoomKey
    num_tokens: int | None
    bootstrap_addr: str
    attempt: int
    life: Lifecycle
    ready: msg.Ready | None = None
    again: int = 0
    source: PeerRoute | None = None
    asked: dict[PeerRoute, Asked] = field(default_factory=dict)
    crossed_out: set[PeerRoute] = field(default_factory=set)
    known_at: float | None = None
    looked_up_at: float = 0.0
    lookup_pending: bool = False
    looked_up: bool = False
    lookup_error: PDError | None = None
    next_subscribe: float = 0.0
    whole_room: bool = False
    pages: int = 0
    nbytes: int = 0
    pulled_at: float | None = None

    @property
    def who(self) -> str:
        """Those waited for, for texts."""
        return ", ".join(sorted(map(str, self.relied_on)))

    @property
    def relied_on(self) -> dict[PeerRoute, Asked]:
        """Those whose answers it waits for: whoever has said that it has the request; until then, all."""
        have = {route: asked for route, asked in self.asked.items() if asked.known == "yes"}
        return have or self.asked

    @property
    def retries(self) -> int:
        """How often the transfer was begun anew: it was offered again, not only asked for."""
        return self.ready.again if self.ready is not None else 0

    @property
    def met(self) -> bool:
        """Whether a P knows of it, or has said that it never will."""
        return bool(self.crossed_out) or any(asked.known == "yes" for asked in self.asked.values())


class LookUp(NamedTuple):
    """Ask the bootstrap server of this interest for prefill instances; answer with `found` or `not_found`."""

    interest: Interest


class Lost(NamedTuple):
    """A P that is gone, or was restarted: nobody is to be sent there again."""

    route: PeerRoute


class Send(NamedTuple):
    """Send a message to a P."""

    route: PeerRoute
    message: msg.Message


Action = LookUp | Lost | Send
