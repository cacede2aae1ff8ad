"""An `OfferTable` whose clock and peers are a test's, and offers in every state."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from sgl_pd_connector.base import KVPoll
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
            again=offer.again,
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
        offer.sent_at = self.now
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
