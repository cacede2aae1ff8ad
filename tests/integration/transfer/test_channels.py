"""The threads and sockets around the tables: what peers, look-ups and the transport can do to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import zmq

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import BootstrapError, ConfigError, IncompatiblePeerError, TransferAbortedError
from sgl_pd_connector.transfer import interests, offers
from sgl_pd_connector.transfer.budget import ByteBudget
from sgl_pd_connector.transfer.decode_channel import DecodeChannel
from sgl_pd_connector.transfer.interest import Interest, PeerRoute
from sgl_pd_connector.transfer.interests import InterestTable
from sgl_pd_connector.transfer.known_routes import KnownRoutes
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.offers import Offer, OfferTable, PackedChunk
from sgl_pd_connector.transfer.prefill_channel import PrefillChannel
from sgl_pd_connector.transfer.transport import Peer
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.chunks import Chunk
from sgl_pd_connector.wire.frames import FrameCodec
from sgl_pd_connector.wire.rooms import RoomKey
from tests.waiting import eventually

pytestmark = pytest.mark.integration

KEY = RoomKey(7, b"prompt")
EPOCH = 5
SIZE = 100


class Transport:
    """P's side of one, whose calls can be made to fail."""

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.register_error: Exception | None = None
        self.release_error: Exception | None = None

    def register(self, uuid: int, buffers: Sequence[Any], lifetime: float) -> None:
        if self.register_error is not None:
            raise self.register_error
        self.registered.add(uuid)

    def release(self, uuid: int) -> None:
        if self.release_error is not None:
            raise self.release_error
        self.registered.discard(uuid)

    def sweep(self) -> None: ...

    def link(self, peer: Peer) -> Any:
        raise AssertionError("a prefill instance pulls nothing")


class P:
    """A prefill channel on a free port, and a bare socket of a D that says what a test wants."""

    def __init__(self, port: int = 0) -> None:
        self.transport = Transport()
        self.budget = ByteBudget(1000)
        self.ended: list[Offer] = []
        table = OfferTable(
            timeouts=offers.Timeouts(30.0, 600.0, 60.0),
            epoch=EPOCH,
            layout_digest="digest",
            ready=self._ready,
            new_uuid=lambda: 1,
            ended=self.ended.append,
        )
        self.channel = PrefillChannel(
            table,
            transport=self.transport,
            budget=self.budget,
            codec=FrameCodec(None),
            address=Address.of("127.0.0.1", port, setting="host"),
            peer_timeout=10.0,
            offer_lifetime=100.0,
        )
        self.codec = FrameCodec(None)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(f"tcp://{self.channel.zmq_addr}")

    @staticmethod
    def _ready(offer: Offer, uuids: Sequence[int]) -> msg.Ready:
        chunks = [msg.ReadyChunk(uuid=uuid, first=0, pages=1) for uuid in uuids]
        return msg.Ready(
            room=7, attempt=offer.attempt or 0, num_tokens=1, layout={}, groups={1: [1]}, chunks=chunks
        )

    def add(self) -> Offer:
        offer = Offer(KEY, 1, Lifecycle(time.monotonic()))
        assert self.channel.add(offer)
        return offer

    def pack(self, offer: Offer) -> None:
        assert self.budget.take(SIZE)
        self.channel.packed(offer, [PackedChunk(Chunk(0, 1), ["buffer"])], SIZE)

    def say(self, message: msg.Message) -> None:
        self.socket.send(self.codec.encode(message, time.time()))

    def subscribe(self) -> None:
        self.say(
            msg.Subscribe(
                room=7, attempt=1, prompt=b"prompt", epoch=EPOCH, instance_id="d", layout_digest="digest"
            )
        )

    def hear(self) -> msg.Message:
        assert self.socket.poll(20_000), "no answer"
        return self.codec.decode(self.socket.recv(), time.time())

    def close(self) -> None:
        self.channel.close()
        self.socket.close(0)
        self._context.term()


@pytest.fixture
def p() -> Iterator[P]:
    p = P()
    yield p
    p.close()


def assert_served(p: P) -> None:
    """The next request goes all the way."""
    ended = len(p.ended)
    p.transport.register_error = p.transport.release_error = None
    offer = p.add()
    p.pack(offer)
    p.subscribe()
    while not isinstance(p.hear(), msg.Ready):
        pass
    p.say(msg.Done(room=7, attempt=1))
    eventually(lambda: len(p.ended) == ended + 1, "the end of it")
    assert offer.life.state is KVPoll.Success
    assert p.budget.held == 0


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"\xc1"], [b"\x00" * 100], [b"one", b"two"], [b"", b"", b""], [b"\x93" * 1000]],
    ids=lambda frames: str([frame[:4] for frame in frames]),
)
def test_frames_that_p_does_not_understand_are_counted_and_cost_nothing(
    p: P, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        p.socket.send_multipart(frames)
    eventually(lambda: p.channel.bad_frames.count == 50, "counted")
    assert "ignoring a bad frame from 127.0.0.1 (1 so far)" in caplog.text
    assert_served(p)


def test_a_frame_longer_than_any_message_costs_only_its_connection(p: P) -> None:
    p.socket.send(b"x" * (64 << 20))
    assert_served(p)


def test_a_transport_that_refuses_a_copy_fails_that_request_on_both_sides(p: P) -> None:
    p.transport.register_error = RuntimeError("no more memory")
    offer = p.add()
    p.subscribe()
    assert isinstance(p.hear(), msg.Wait)
    p.pack(offer)
    refusal = p.hear()
    assert isinstance(refusal, msg.Failed)
    assert "no more memory" in refusal.reason
    assert "no more memory" in str(offer.life.failure_exception())
    eventually(lambda: p.budget.held == 0, "bytes given back")
    assert_served(p)


def test_a_transport_that_does_not_let_go_does_not_keep_the_budget(p: P) -> None:
    offer = p.add()
    p.pack(offer)
    p.subscribe()
    assert isinstance(p.hear(), msg.Ready)
    p.transport.release_error = RuntimeError("strange")
    p.channel.abort(offer, "client gone")
    assert isinstance(p.hear(), msg.Abort)
    eventually(lambda: p.budget.held == 0, "bytes given back")
    p.transport.registered.clear()
    assert_served(p)


def test_p_that_stops_tells_the_d_that_waits(p: P) -> None:
    p.subscribe()
    assert isinstance(p.hear(), msg.Wait)
    p.channel.close()
    p.channel.close()
    said = p.hear()
    assert isinstance(said, msg.Abort)
    assert "stopping" in said.reason
    assert not p.channel.add(Offer(KEY, 1, Lifecycle(0.0)))


def test_a_port_in_use_is_an_error_that_names_the_setting(p: P) -> None:
    port = int(p.channel.zmq_addr.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*side_channel_port"):
        P(port)


# D: the look-ups. What it then says to P is tested with whole processes.


class D:
    """A decode channel whose look-ups a test answers."""

    def __init__(self, look_up: Callable[[str], Sequence[PeerRoute]]) -> None:
        self.ended: list[Interest] = []
        table = InterestTable(
            timeouts=interests.Timeouts(30.0, 10.0, 600.0, 60.0),
            instance_id="d",
            layout_digest="digest",
            check=lambda *_: None,
            ended=self.ended.append,
        )
        self.channel = DecodeChannel(
            table, codec=FrameCodec(None), look_up=look_up, known=KnownRoutes(15.0), peer_timeout=10.0
        )
        self._attempts = iter(range(1, 10_000))

    def want(self, bootstrap: str) -> Interest:
        interest = Interest(KEY, 1, bootstrap, next(self._attempts), Lifecycle(time.monotonic()))
        assert self.channel.add(interest)
        return interest


def test_a_d_that_stops_tells_p_before_it_waits_for_look_ups() -> None:
    answer = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as p:
        p.linger, p.rcvtimeo = 0, 30_000
        port = p.bind_to_random_port("tcp://127.0.0.1")
        route = PeerRoute(Peer("p", EPOCH, "127.0.0.1:1", (1,)), f"127.0.0.1:{port}")

        def look_up(address: str) -> Sequence[PeerRoute]:
            if address == "hangs":
                answer.wait(60)
            return [route]

        d = D(look_up)
        d.want("hangs")
        interest = d.want("answers")
        codec = FrameCodec(None)

        def hear() -> msg.Message:
            return codec.decode(p.recv_multipart()[-1], time.time())

        assert isinstance(hear(), msg.Subscribe)
        closing = threading.Thread(target=d.channel.close)
        closing.start()
        try:
            while isinstance(said := hear(), msg.Subscribe):
                pass
            assert isinstance(said, msg.Abort)
            assert said.attempt == interest.attempt
            assert closing.is_alive()
        finally:
            answer.set()
            closing.join()


def test_a_bootstrap_server_that_does_not_answer_is_asked_once_and_holds_up_no_other() -> None:
    asked: list[str] = []
    answer = threading.Event()

    def look_up(address: str) -> Sequence[PeerRoute]:
        asked.append(address)
        if address == "slow":
            answer.wait(20)
        raise IncompatiblePeerError(f"{address} has none")

    d = D(look_up)
    slow = [d.want("slow") for _ in range(100)]
    other = d.want("other")
    eventually(lambda: other.life.is_final, "the other is answered")
    assert sorted(asked) == ["other", "slow"]
    answer.set()
    eventually(lambda: all(interest.life.is_final for interest in slow), "one answer for all")
    assert asked.count("slow") == 1
    assert len(d.ended) == 101
    d.channel.close()


@pytest.mark.parametrize("error", [BootstrapError("connection refused"), ZeroDivisionError("a bug")])
def test_a_look_up_that_fails_is_repeated(error: Exception) -> None:
    asked: list[str] = []

    def look_up(address: str) -> Sequence[PeerRoute]:
        asked.append(address)
        if len(asked) < 3:
            raise error
        raise IncompatiblePeerError("page_size")

    d = D(look_up)
    interest = d.want("boot")
    eventually(lambda: interest.life.is_final, "the third answer")
    assert "page_size" in str(interest.life.error)
    d.channel.close()


def test_d_that_stops_waits_for_no_answer_to_be_useful() -> None:
    answer = threading.Event()
    looking = threading.Event()

    def look_up(address: str) -> Sequence[PeerRoute]:
        looking.set()
        answer.wait(20)
        return []

    d = D(look_up)
    interest = d.want("boot")
    assert looking.wait(20)
    closing = threading.Thread(target=d.channel.close)
    closing.start()
    eventually(lambda: interest.life.is_final, "aborted at once")
    assert isinstance(interest.life.error, TransferAbortedError)
    answer.set()
    closing.join()
    assert d.ended == [interest]
    assert not d.channel.add(interest)
