"""A server cannot keep a caller for longer than the timeout, nor fill its memory."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from sgl_pd_connector.bootstrap import client as client_module
from sgl_pd_connector.bootstrap.client import BootstrapClient, BootstrapUnavailableError
from sgl_pd_connector.errors import BootstrapError
from sgl_pd_connector.wire.address import Address
from tests.registrations import make_routes

pytestmark = pytest.mark.unit

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
DRIP = 0.02

Serve = Callable[[bytes, bytes, float], Address]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that sends ``first``, then ``again`` every ``pause`` seconds until the other side hangs up."""
    with contextlib.ExitStack() as stack:

        def start(first: bytes, again: bytes, pause: float) -> Address:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(first)
                    hung_up = threading.Event()
                    while again and not hung_up.wait(pause):
                        connection.sendall(again)
                    while connection.recv(65_536):
                        pass

            thread = threading.Thread(target=run)
            thread.start()
            stack.callback(thread.join)
            return Address("127.0.0.1", listener.getsockname()[1])

        yield start


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (HEAD + b"X-Long: ", b"x"),
        (HEAD, b""),
        (b"", b""),
    ],
    ids=["body", "chunks", "header", "stops", "silent"],
)
def test_an_answer_that_trickles_costs_the_timeout_and_no_more(
    serve: Serve, first: bytes, again: bytes
) -> None:
    # Without a deadline for the whole, the trickling ones never end.
    address = serve(first, again, DRIP)
    with (
        BootstrapClient(address, timeout=0.3, timeout_setting="peer_timeout") as client,
        pytest.raises(BootstrapUnavailableError) as caught,
    ):
        client.list("prefill")
    assert "in 1 tries within 0.3 s (setting peer_timeout): timed out before it was complete" in str(
        caught.value
    )
    assert not [thread for thread in threading.enumerate() if thread.name == "sgl-pd-http-deadline"]


def test_an_answer_in_time_may_come_in_any_number_of_pieces(serve: Serve) -> None:
    routes = make_routes(2)
    body = b'{"routes": [%s]}' % b",".join(route.wire_json for route in routes)
    address = serve(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body) + 9, body), b" ", 0.001)
    with BootstrapClient(address, timeout=30.0) as client:
        assert client.list("prefill") == routes


def test_an_answer_without_end_is_refused_by_its_size(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 1 << 20)
    address = serve(HEAD + b"\r\n", b" " * (256 << 10), 0.0)
    with (
        BootstrapClient(address, timeout=30.0) as client,
        pytest.raises(BootstrapError, match=r"to GET /list is longer than 1 MiB \(MAX_ANSWER_BYTES\)"),
    ):
        client.list("prefill")


def test_ten_thousand_routes_are_far_from_that_bound() -> None:
    (route,) = make_routes(1)
    assert 10_000 * len(route.wire_json) * 10 < client_module.MAX_ANSWER_BYTES
