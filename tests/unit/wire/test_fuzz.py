"""Bytes from anybody: 10^5 damaged frames and bodies are understood or refused, and never anything else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from sgl_pd_connector.errors import ConfigError, ProtocolError
from sgl_pd_connector.transfer.interest import Interest, PeerRoute
from sgl_pd_connector.transfer.interests import InterestTable
from sgl_pd_connector.transfer.interests import Timeouts as InterestTimeouts
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.offers import Offer, OfferTable, PackedChunk, Release
from sgl_pd_connector.transfer.offers import Timeouts as OfferTimeouts
from sgl_pd_connector.transfer.transport import Peer
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.chunks import Chunk
from sgl_pd_connector.wire.frames import FrameCodec
from sgl_pd_connector.wire.rooms import RoomKey
from sgl_pd_connector.wire.routes import Heartbeat, Rank, Route
from tests.registrations import make_route
from tests.support.mutations import mutated

pytestmark = pytest.mark.unit

NOW = 1_700_000_000.0
READY: dict[str, Any] = {
    "num_tokens": 9,
    "layout": {"page_size": 4, "dtype": "bfloat16"},
    "groups": {1: [4], 2: [2, 2]},
    "chunks": [msg.ReadyChunk(uuid=5, first=0, pages=2), msg.ReadyChunk(uuid=6, first=2, pages=1)],
}
MESSAGES: list[msg.Message] = [
    msg.Subscribe(room=7, attempt=1, prompt=b"p" * 16, epoch=3, instance_id="d", layout_digest="l"),
    msg.Wait(room=7, attempt=1, known="yes"),
    msg.Ready(room=7, attempt=1, **READY),
    msg.Done(room=7, attempt=1),
    msg.Failed(room=7, attempt=1, reason="because"),
    msg.Abort(room=7, attempt=1, reason="client gone"),
]
FRAMES = [msg.encode(message) for message in MESSAGES]


def test_a_damaged_frame_is_a_message_or_a_protocol_error() -> None:
    understood = 0
    for frame in mutated(FRAMES, 50_000, seed=1):
        try:
            message = msg.decode(frame)
        except ProtocolError:
            continue
        understood += 1
        assert msg.decode(msg.encode(message)) == message
    assert understood > 100, "some damage must leave a valid message, or only the first check is tested"


def test_no_damaged_frame_passes_as_signed() -> None:
    sender, receiver = FrameCodec("x" * 16), FrameCodec("x" * 16)
    signed = [sender.encode(message, NOW) for message in MESSAGES]
    for frame in mutated(signed, 30_000, seed=2):
        if frame not in signed:
            with pytest.raises(ProtocolError):
                receiver.decode(frame, NOW)
    # What was tried with their numbers does not make the originals replays.
    assert [receiver.decode(frame, NOW) for frame in signed] == MESSAGES


def test_whatever_d_says_p_keeps_its_books() -> None:
    released = 0
    table = OfferTable(
        timeouts=OfferTimeouts(30.0, 600.0, 60.0),
        epoch=3,
        layout_digest="l",
        ready=lambda offer, uuids: msg.Ready(room=offer.key.room, attempt=offer.attempt or 0, **READY),
        new_uuid=lambda: 5,
        ended=lambda _offer: None,
    )
    for number, frame in enumerate(mutated(FRAMES, 15_000, seed=3)):
        now = number * 0.01
        if number % 20 == 0:
            offer = Offer(RoomKey(7, b"p" * 16), 9, Lifecycle(now))
            table.add(offer, now)
            table.packed(offer, [PackedChunk(Chunk(0, 3), ["buffer"])], 100, now)
        try:
            message = msg.decode(frame)
        except ProtocolError:
            continue
        for action in [*table.on_message(b"peer", message, now), *table.tick(now)]:
            released += action.packed_bytes if isinstance(action, Release) else 0
    for action in table.close("end", 1e6):
        released += action.packed_bytes if isinstance(action, Release) else 0
    assert released == 100 * 15_000 // 20, "every copy is given back once"
    assert (len(table), table.registered_bytes) == (0, 0)


def test_whatever_p_says_d_keeps_its_books() -> None:
    ended: list[Interest] = []

    def check(_interest: Interest, ready: msg.Ready) -> None:
        if ready.num_tokens != 9:
            raise ProtocolError("another prompt")

    table = InterestTable(
        timeouts=InterestTimeouts(30.0, 10.0, 600.0, 60.0),
        instance_id="d",
        layout_digest="l",
        check=check,
        ended=ended.append,
    )
    route = PeerRoute(Peer("p", 3, "127.0.0.1:1"), "127.0.0.1:2")
    started = 0
    for number, frame in enumerate(mutated(FRAMES, 15_000, seed=4)):
        now = number * 0.01
        if len(table) == 0:
            started += 1
            interest = Interest(RoomKey(7, b"p" * 16), 9, "b", 1, Lifecycle(now))
            table.add(interest, now)
            table.found(interest, [route], now)
        try:
            table.on_message(route, msg.decode(frame), now)
        except ProtocolError:
            continue
        table.tick(now)
    table.close("end", 1e6)
    assert started > 50
    assert len(ended) == started, "every request ends once"
    assert len(table) == 0


@pytest.mark.parametrize(
    ("model", "seeds"),
    [
        (Route, [make_route().wire_json]),
        (
            Heartbeat,
            [
                Heartbeat(role="decode", instance_id="a", epoch=9, ranks=[Rank(0, 0, 0, 0)])
                .model_dump_json()
                .encode()
            ],
        ),
    ],
)
def test_a_damaged_body_is_refused_by_name_or_read(model: type[BaseModel], seeds: list[bytes]) -> None:
    for body in mutated(seeds, 10_000, seed=5):
        try:
            parsed = model.model_validate_json(body)
        except ValidationError:
            continue
        assert model.model_validate_json(parsed.model_dump_json()) == parsed


def test_a_damaged_address_is_refused_or_read() -> None:
    seeds = [b"127.0.0.1:8998", b"[2001:db8::1]:80", b"host.example:65535", b"[fe80::1%eth0]:1"]
    for data in mutated(seeds, 10_000, seed=6):
        text = data.decode("latin-1")
        try:
            address = Address.parse(text, setting="test")
        except ConfigError:
            continue
        assert Address.parse(str(address), setting="test") == address
