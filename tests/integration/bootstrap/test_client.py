"""What the client makes of servers that are absent, silent, or no bootstrap servers."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from sgl_pd_connector.bootstrap.client import (
    BootstrapClient,
    BootstrapRefusedError,
    BootstrapUnavailableError,
)
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
from sgl_pd_connector.errors import BootstrapError
from sgl_pd_connector.wire.address import Address
from tests.registrations import make_route, make_routes

pytestmark = pytest.mark.integration


def listener() -> tuple[socket.socket, Address]:
    """A socket that accepts connections and never answers."""
    silent = socket.create_server(("127.0.0.1", 0))
    return silent, Address("127.0.0.1", silent.getsockname()[1])


def test_nobody_there_is_an_error_with_address_and_setting() -> None:
    silent, address = listener()
    silent.close()
    with BootstrapClient(address) as client, pytest.raises(BootstrapUnavailableError) as caught:
        client.list("prefill")
    assert str(address) in str(caught.value)
    assert "bootstrap_port" in str(caught.value)
    assert "in 3 tries" in str(caught.value)


def test_a_server_that_never_answers_costs_the_timeout_and_no_more() -> None:
    silent, address = listener()
    with (
        silent,
        BootstrapClient(address, timeout=0.3) as client,
        pytest.raises(BootstrapUnavailableError, match=r"in 1 tries within 0\.3 s"),
    ):
        client.put(make_route())


def test_a_refusal_is_final_and_carries_status_and_field() -> None:
    server = HTTPBootstrapServer(port=0, max_routes=1, auth_token="secret")
    server.start()
    try:
        with BootstrapClient(server.address) as client:
            with pytest.raises(BootstrapRefusedError, match="shared secret") as refused:
                client.list("prefill")
            assert (refused.value.status, refused.value.field) == (401, "Authorization")
        with BootstrapClient(server.address, auth_token="secret") as client:
            first, second = make_routes(2)
            client.put(first)
            with pytest.raises(BootstrapRefusedError, match="max_routes") as full:
                client.put(second)
            assert full.value.status == 503
    finally:
        server.stop()


class _Stranger(http.server.BaseHTTPRequestHandler):
    """Some other web server: JSON it may speak, but not ours."""

    def do_GET(self) -> None:
        known = self.path.startswith(("/list", "/health"))
        body = b'{"routes": 5}' if known else b'{"detail":"Not Found"}'
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[Address]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Address("127.0.0.1", server.server_port)
        server.shutdown()
        thread.join()


def test_another_kind_of_server_is_not_taken_for_an_empty_registry(stranger: Address) -> None:
    with BootstrapClient(stranger) as client:
        with pytest.raises(BootstrapRefusedError, match="not the answer of a bootstrap server"):
            client.get(make_route().key)
        with pytest.raises(BootstrapError, match="not answered as a bootstrap server does: routes"):
            client.list("prefill")


def test_proxies_of_the_environment_are_not_used(
    server: HTTPBootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with BootstrapClient(server.address) as client:
        assert client.list("prefill") == []
