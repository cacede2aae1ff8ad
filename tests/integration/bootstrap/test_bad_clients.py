"""Clients that are slow, silent, too many, or never finish: none of them holds the server up."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from sgl_pd_connector.bootstrap import guard
from sgl_pd_connector.bootstrap import server as server_module
from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
from sgl_pd_connector.wire.routes import MAX_MESH_META_BYTES, Rank
from tests.registrations import make_route
from tests.waiting import eventually

pytestmark = pytest.mark.integration

HALF_A_HEAD = b"PUT /route HTTP/1.1\r\nHost: h\r\n"
HALF_A_BODY = HALF_A_HEAD + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
WHOLE = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"


def connect(
    server: HTTPBootstrapServer, sent: bytes = b"", receive_buffer: int | None = None
) -> socket.socket:
    address = server.address
    connection = socket.socket(address.family or socket.AF_INET)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30.0)
    connection.connect((address.host, address.port))
    connection.sendall(sent)
    return connection


def ended(connection: socket.socket) -> bytes:
    """What the server sent until it ended the connection."""
    received = b""
    try:
        while piece := connection.recv(65_536):
            received += piece
    except ConnectionResetError:
        pass
    return received


@pytest.fixture
def patience() -> float:
    return 0.3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, host: str, patience: float) -> Iterator[HTTPBootstrapServer]:
    monkeypatch.setattr(server_module, "PATIENCE", patience)
    server = HTTPBootstrapServer(host, 0)
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize(
    "sent", [b"", b"G", HALF_A_HEAD, HALF_A_BODY], ids=["silent", "byte", "head", "body"]
)
def test_a_request_that_is_never_finished_is_cut_off(impatient: HTTPBootstrapServer, sent: bytes) -> None:
    with connect(impatient, sent) as connection:
        assert ended(connection) == b""


@pytest.mark.parametrize("host", ["127.0.0.1"])
@pytest.mark.parametrize("patience", [2.0])
def test_patience_starts_anew_with_every_answer(impatient: HTTPBootstrapServer, patience: float) -> None:
    outlived = time.monotonic() + 1.2 * patience
    with connect(impatient) as connection:
        while time.monotonic() < outlived:
            connection.sendall(WHOLE)
            answer = b""
            while not answer.endswith(b"}"):
                piece = connection.recv(65_536)
                assert piece, "cut off between two answers"
                answer += piece
        connection.sendall(HALF_A_HEAD)
        assert ended(connection) == b""


def test_a_body_that_takes_too_long_is_answered_408(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT", 0.2)
    server = HTTPBootstrapServer(host, 0)
    server.start()
    try:
        with connect(server, HALF_A_BODY) as connection:
            answer = ended(connection)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"not complete after 0.2 s" in answer
    finally:
        server.stop()


LIST = b"GET /list?role=prefill HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.mark.parametrize("ttl", [120.0])
def test_clients_that_do_not_finish_neither_delay_others_nor_the_stop(
    server: HTTPBootstrapServer, client: BootstrapClient
) -> None:
    padding = {"padding": "x" * (MAX_MESH_META_BYTES - 20)}
    for tp in range(250):
        client.put(make_route(rank=Rank(tp, 0, 0, 0), mesh_meta=padding))
    with ExitStack() as stack:
        for sent in (b"", b"PUT ", HALF_A_HEAD, HALF_A_BODY):
            stack.enter_context(connect(server, sent))
        # Asks for 50 MB, far more than the kernel keeps for it, and reads nothing.
        reader = stack.enter_context(connect(server, LIST * 50, receive_buffer=4096))
        assert reader.recv(12) == b"HTTP/1.1 200"
        assert client.health().prefill == 250
        server.stop()
        assert server.poll() is False
        assert ended(reader).count(b"HTTP/1.1 200") < 49


def test_too_many_connections_are_closed_and_room_returns(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)
    server = HTTPBootstrapServer(host, 0)
    server.start()
    try:
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(connect(server, HALF_A_HEAD))
            with connect(server) as extra:
                assert ended(extra) == b""
        with BootstrapClient(server.address) as client:

            def answered() -> bool:
                return client.health().status == "ok"

            eventually(answered, "served again")
    finally:
        server.stop()


def test_answers_are_not_held_back_by_nagles_algorithm(server: HTTPBootstrapServer) -> None:
    # asyncio turns it off on the connections of listeners that name their protocol, and only on those.
    assert server._server is not None
    assert [listener.proto for listener in server._server.servers[0].sockets] == [socket.IPPROTO_TCP]
