from __future__ import annotations

import datetime
import errno
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from sgl_pd_connector.transfer.engine import MIN_LIFETIME, RELEASED_LIFETIME, JaxLink, JaxTransferKVEngine
from sgl_pd_connector.transfer.transport import Peer

pytestmark = pytest.mark.unit


class FakeServer:
    """The native server, which keeps an offer until it is pulled or its time is over."""

    def __init__(self) -> None:
        self.kept: dict[int, datetime.datetime] = {}

    def await_pull(self, uuid: int, arrays: Sequence[Any], timeout: datetime.datetime) -> None:
        self.kept[uuid] = timeout

    def left_after(self, seconds: float) -> list[int]:
        now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
        return [uuid for uuid, expiry in self.kept.items() if expiry > now]


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def engine(server: FakeServer) -> JaxTransferKVEngine:
    engine = JaxTransferKVEngine(
        host="127.0.0.1", port=0, channels=1, transfer_size=1 << 20, serve=False, stall_timeout=1.0
    )
    engine._server = server  # type: ignore[assignment]
    return engine


def test_what_is_taken_back_leaves_nothing_in_the_native_server_for_ever(
    engine: JaxTransferKVEngine, server: FakeServer
) -> None:
    engine.register(1, [], lifetime=1000.0)
    engine.release(1)
    engine.release(2)
    assert server.left_after(RELEASED_LIFETIME - 1) == [1, 2], "a late pull is told"
    assert not server.left_after(RELEASED_LIFETIME)


def test_an_offer_is_kept_as_long_as_it_must_be_and_one_that_is_too_short_for_the_native_clock_longer(
    engine: JaxTransferKVEngine, server: FakeServer
) -> None:
    engine.register(1, [], lifetime=10.0)
    engine.register(2, [], lifetime=0.1)
    assert server.left_after(MIN_LIFETIME - 1) == [1, 2]
    assert server.left_after(9) == [1]
    assert not server.left_after(10)


class FakeNative:
    """A native server of D: connecting opens as many sockets as it has channels, and one."""

    def __init__(self, listener: socket.socket, channels: int) -> None:
        self._port: int = listener.getsockname()[1]
        self._count = 1 + channels
        self.sockets: list[socket.socket] = []
        self.is_poisoned = False

    def connect(self, _: str) -> FakeNative:
        self.sockets = [socket.create_connection(("127.0.0.1", self._port)) for _ in range(self._count)]
        return self

    def _poison_connection(self) -> None:
        self.is_poisoned = True

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


CHANNELS = 2
NewLink = Callable[[], tuple[JaxLink, FakeNative]]


@pytest.fixture
def new_link() -> Iterator[NewLink]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]

        def make() -> tuple[JaxLink, FakeNative]:
            native = FakeNative(listener, CHANNELS)
            link = JaxLink(native, Peer("p", 1, f"127.0.0.1:{port}", (port,)), CHANNELS)  # type: ignore[arg-type]
            stack.callback(native.close)
            return link, native

        yield make


def test_a_link_is_whole_while_all_its_connections_stand(new_link: NewLink) -> None:
    link, native = new_link()
    assert link.is_whole()
    native.sockets[1].close()
    assert not link.is_whole()


def test_a_retired_link_does_not_count_its_successors_connections(
    new_link: NewLink, caplog: pytest.LogCaptureFixture
) -> None:
    link, native = new_link()
    native.sockets[0].close()
    link.retire()
    successor, _ = new_link()
    assert not link.is_whole()
    assert "2 of 3 connections to the transfer server at 127.0.0.1" in caplog.text
    assert successor.is_whole()


def test_cutting_a_link_ends_its_connections_and_no_others(new_link: NewLink) -> None:
    before, _ = new_link()
    before.retire()
    link, _ = new_link()
    link.retire()
    successor, _ = new_link()
    link.cut()
    assert [each.is_whole() for each in (before, link, successor)] == [True, False, True]


def test_without_a_descriptor_left_a_link_is_not_trusted_and_still_cut(
    new_link: NewLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link, native = new_link()

    def none_left(path: str) -> list[str]:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "listdir", none_left)
    assert not link.is_whole()
    link.retire()
    link.cut()
    assert native.is_poisoned
    assert "cannot look at the connections to the transfer server at 127.0.0.1" in caplog.text
