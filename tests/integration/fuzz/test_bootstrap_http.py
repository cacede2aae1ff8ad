"""Strangers at the bootstrap server: no bytes make it fail, forget what is registered, or grow."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
from sgl_pd_connector.wire.routes import Heartbeat, Rank
from tests.registrations import make_route
from tests.support.mutations import mutated
from tests.waiting import eventually

pytestmark = pytest.mark.integration

BEAT = Heartbeat(role="decode", instance_id="a", epoch=9, ranks=[Rank(0, 0, 0, 0)]).model_dump_json().encode()


def request(method: bytes, path: bytes, body: bytes = b"") -> bytes:
    head = b"%b %b HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (method, path, len(body)) + body


REQUESTS = [
    request(b"PUT", b"/route", make_route().wire_json),
    request(b"POST", b"/heartbeat", BEAT),
    request(b"GET", b"/list?role=prefill"),
    request(b"DELETE", b"/route?role=decode&instance_id=a&tp_rank=0&cp_rank=0&dp_rank=0&pp_rank=0"),
    request(b"GET", b"/health"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[HTTPBootstrapServer]:
    server = HTTPBootstrapServer("127.0.0.1", 0)
    server.start()
    yield server
    server.stop()


def status(server: HTTPBootstrapServer, data: bytes) -> int | None:
    """Of the first answer; None if the server only closed the connection."""
    with socket.create_connection((server.address.host, server.address.port), timeout=30.0) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65_536):
                answer += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
    return int(answer.split(b" ", 2)[1]) if answer else None


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_damaged_requests(server: HTTPBootstrapServer) -> None:
    kept = make_route(instance_id="kept")
    with BootstrapClient(server.address) as client:
        client.put(kept)
        before = descriptors()
        answers = [status(server, data) for data in mutated(REQUESTS, 2_000, seed=1)]
        assert not [answer for answer in answers if answer is not None and answer >= 500]
        assert {200, 400} < set(answers), "some get through, some are refused"
        assert kept in client.list("prefill")
        eventually(lambda: descriptors() <= before, "no more connections than before")
