"""A real server on a free port of each loopback family, and clients of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.fixture(
    params=[
        "127.0.0.1",
        pytest.param(
            "::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
        ),
    ]
)
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ttl() -> float:
    return 15.0


@pytest.fixture
def server(host: str, ttl: float) -> Iterator[HTTPBootstrapServer]:
    server = HTTPBootstrapServer(host, 0, ttl=ttl)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: HTTPBootstrapServer) -> Iterator[BootstrapClient]:
    with BootstrapClient(server.address) as client:
        yield client
