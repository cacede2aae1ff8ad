"""Strangers at the side channel of a real P: whatever they send, a real D is served meanwhile and after."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator

import pytest
import zmq

from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.address import Address
from tests.faults.scene import DEADLINES
from tests.support.engine_pair import EnginePair
from tests.support.mutations import mutated
from tests.waiting import eventually

pytestmark = pytest.mark.integration

# How a ZMTP 3 connection begins (rfc.zeromq.org/spec/23).
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
DEALER = GREETING + bytes([4, len(READY)]) + READY

SUBSCRIBE = msg.Subscribe(room=7, attempt=1, prompt=b"p" * 16, epoch=3, instance_id="d", layout_digest="l")
MESSAGES = [
    SUBSCRIBE,
    msg.Done(room=7, attempt=1),
    msg.Failed(room=7, attempt=1, reason="because"),
]
FRAMES = [msg.encode(message) for message in MESSAGES]


class Target:
    """A pair, and the port of P's side channel."""

    def __init__(self, pair: EnginePair, port: int) -> None:
        self._pair = pair
        self._address = ("127.0.0.1", port)
        with BootstrapClient(Address.parse(pair.p.bootstrap, setting="test")) as client:
            [route] = client.list("prefill")
        self.subscribe = SUBSCRIBE.model_copy(
            update={"epoch": route.epoch, "layout_digest": route.layout_digest}
        )
        """One that P has no reason to refuse."""
        self.request()
        self._before = pair.p.resources()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._address[1]}"

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self._address, timeout=30.0)
        with contextlib.suppress(OSError):  # P may have had enough of it already
            connection.sendall(sent)
        return connection

    def request(self) -> None:
        moved = self._pair.request(60)
        moved.finish()
        assert self._pair.d.digests(moved.d_pages) == self._pair.p.digests(moved.p_pages)

    @property
    def bad_frames(self) -> int:
        return self._pair.p.stats()["bad_frames"]

    def recovered(self) -> None:
        """The next request is served and P holds no more than before."""
        self.request()

        def nothing_left() -> bool:
            now = self._pair.p.resources()
            return all(now[name] <= number for name, number in self._before.items())

        eventually(nothing_left, f"as few descriptors and threads as before: {self._before}")
        assert self._pair.p.stats()["in_flight"] == 0


@pytest.fixture(scope="module")
def target(fork_server: None) -> Iterator[Target]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with EnginePair(p_config=DEADLINES | {"side_channel_port": port}) as pair:
        yield Target(pair, port)


def test_junk_instead_of_a_greeting(target: Target) -> None:
    for data in mutated([DEALER, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00"], 300, seed=1):
        target.connect(data).close()
    target.recovered()


def test_junk_after_a_greeting(target: Target) -> None:
    frames = [bytes([0, len(frame)]) + frame for frame in FRAMES] + [b"\x04\x07\x04PING\x00\x00", b"\x01\x00"]
    for data in mutated(frames, 300, seed=2):
        target.connect(DEALER + data).close()
    target.recovered()


@pytest.mark.parametrize("length", [2**21, 2**40, 2**63, 2**64 - 1])
def test_a_frame_of_any_length_may_be_announced(target: Target, length: int) -> None:
    announced = DEALER + b"\x02" + struct.pack(">Q", length) + bytes(1000)
    with target.connect(announced) as connection, contextlib.suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    target.recovered()


def test_damaged_messages(target: Target) -> None:
    before = target.bad_frames
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(target.url)
        for number, frame in enumerate(mutated(FRAMES, 10_000, seed=3)):
            # Some in several parts, which no message has.
            dealer.send_multipart([frame] * (1 + number % 3))
        eventually(lambda: target.bad_frames > before + 5_000, "most of them read")
        target.request()
    target.recovered()


def test_connections_that_say_nothing_are_closed(target: Target) -> None:
    sent = (b"", GREETING[:10], GREETING, DEALER)
    silent = [target.connect(sent[i % 4]) for i in range(60)]
    target.request()
    target.recovered()
    for connection in silent:
        connection.close()


def test_a_flood_of_rooms(target: Target) -> None:
    generator = random.Random(4)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.SNDHWM, 0)
        dealer.connect(target.url)
        for _ in range(20_000):
            fields = {"room": generator.getrandbits(62), "attempt": generator.getrandbits(62)}
            dealer.send(msg.encode(target.subscribe.model_copy(update=fields)))
        target.request()
    target.recovered()


def test_a_peer_that_never_reads(target: Target) -> None:
    subscribe = msg.encode(target.subscribe)
    frames = (bytes([0, len(subscribe)]) + subscribe) * 1000
    with target.connect(DEALER) as connection:
        connection.settimeout(0.5)
        with contextlib.suppress(OSError):  # once P has no room for more
            for _ in range(50):
                connection.sendall(frames)
        target.request()
        target.recovered()
