"""Which bootstrap servers a request may make D ask, and when D resolves a name. No server is there to answer."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.errors import BootstrapError, ConfigError, ForbiddenPeerError
from sgl_pd_connector.transfer.peers import PrefillFinder
from sgl_pd_connector.wire.layout import KVLayout
from sgl_pd_connector.wire.routes import Role, Route

pytestmark = pytest.mark.unit

LAYOUT = KVLayout(num_layers=4, page_size=16, dtype="bfloat16", page_shape=(16, 2), sharding=(1, 1))
NAMES = {"prefill.svc": "10.0.0.7", "localhost": "127.0.0.1"}


class Asked:
    """What D's resolver and the bootstrap servers were asked for."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.servers: list[str] = []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()

    def resolve(host: str, port: int, *_: Any) -> list[Any]:
        if not host[0].isdigit():
            asked.names.append(host)
            if host not in NAMES:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (NAMES.get(host, host), port))]

    def no_routes(client: BootstrapClient, role: Role) -> list[Route]:
        asked.servers.append(str(client.address))
        return []

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(BootstrapClient, "list", no_routes)
    return asked


def finder(*allowed: str, own_bootstrap: str | None = None) -> PrefillFinder:
    config = ConnectorConfig(host="10.0.0.1", allowed_bootstrap_hosts=allowed)
    return PrefillFinder(config, LAYOUT, own_bootstrap=own_bootstrap, auth_token=None)


def test_a_name_that_cannot_be_resolved_is_a_server_that_is_down_for_now(asked: Asked) -> None:
    with pytest.raises(BootstrapError, match=r"bootstrap_host: cannot resolve 'late\.svc'"):
        finder("late.svc")("late.svc:8998")
    with pytest.raises(BootstrapError, match=r"cannot resolve 'own\.svc'"):
        finder(own_bootstrap="own.svc:8998")("own.svc:8998")


def test_what_is_no_address_at_all_stays_wrong(asked: Asked) -> None:
    with pytest.raises(ConfigError, match="bootstrap_host"):
        finder()("http://prefill.svc:8998")


def test_the_resolved_address_is_asked(asked: Asked) -> None:
    finder("prefill.svc")("prefill.svc:8998")
    finder("10.0.0.0/8")("prefill.svc:8998")
    assert asked.servers == ["10.0.0.7:8998"] * 2


def test_by_default_it_is_loopback_the_own_host_and_bootstrap_addr(asked: Asked) -> None:
    by_default = finder(own_bootstrap="10.0.0.9:8998")
    servers = ["127.0.0.1:1", "10.0.0.1:1", "10.0.0.9:8998"]
    for server in servers:
        by_default(server)
    by_default("localhost:1")
    assert asked.servers == [*servers, "127.0.0.1:1"]
    for server in ("10.0.0.9:1", "10.0.0.7:8998", "prefill.svc:8998"):
        with pytest.raises(ForbiddenPeerError, match="setting allowed_bootstrap_hosts"):
            by_default(server)


def test_a_list_replaces_loopback_and_the_own_host_but_not_bootstrap_addr(asked: Asked) -> None:
    listed = finder("prefill.svc", own_bootstrap="10.0.0.9:8998")
    for server in ("127.0.0.1:1", "10.0.0.1:1"):
        with pytest.raises(ForbiddenPeerError):
            listed(server)
    listed("10.0.0.9:8998")
    assert asked.servers == ["10.0.0.9:8998"]


def test_a_name_is_not_resolved_when_the_list_has_no_use_for_its_address(asked: Asked) -> None:
    with pytest.raises(ForbiddenPeerError):
        finder("prefill.svc", own_bootstrap="10.0.0.9:8998")("evil.svc:22")
    assert asked.names == []
