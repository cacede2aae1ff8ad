"""Starting, stopping, restarting; who stays listed, and that ten thousand fit."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import logging
import socket

import pytest

from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.bootstrap.heartbeat import Registrar, RegistrationStatus
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
from sgl_pd_connector.errors import BootstrapError, ConfigError
from sgl_pd_connector.wire.routes import Heartbeat, HeartbeatReply
from tests.registrations import make_route, make_routes
from tests.waiting import eventually

pytestmark = pytest.mark.integration


def test_it_serves_from_start_to_stop_and_again(host: str) -> None:
    server = HTTPBootstrapServer(host, 0)
    assert server.poll() is False
    with pytest.raises(BootstrapError, match="has not been started"):
        _ = server.address
    server.stop()
    for _ in range(2):
        server.start()
        assert server.poll() is True
        with pytest.raises(BootstrapError, match="already started"):
            server.start()
        with BootstrapClient(server.address) as client:
            assert client.health().status == "ok"
        server.stop()
        assert server.poll() is False
        server.stop()


def test_a_port_in_use_is_one_clear_error_of_start(server: HTTPBootstrapServer) -> None:
    second = HTTPBootstrapServer(server.address.host, server.address.port)
    with pytest.raises(ConfigError) as caught:
        second.start()
    message = str(caught.value)
    assert str(server.address) in message
    assert "in use" in message
    assert "bootstrap_port" in message
    assert "--port" in message
    assert second.poll() is False
    second.stop()


@pytest.mark.parametrize(
    ("host", "port", "named"),
    [("192.0.2.1", 0, "--host"), ("no-such-host.invalid", 0, "--host"), ("127.0.0.1", 70_000, "--host")],
)
def test_an_address_that_cannot_be_bound_names_its_setting(host: str, port: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HTTPBootstrapServer(host, port).start()


def test_the_ipv6_wildcard_serves_ipv4_too() -> None:
    try:
        server = HTTPBootstrapServer("::", 0)
        server.start()
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    try:
        for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as connection:
                connection.connect((loopback, server.address.port))
    finally:
        server.stop()


@pytest.mark.parametrize("ttl", [0.3])
def test_silent_routes_disappear_after_their_ttl_and_are_logged_together(
    client: BootstrapClient, caplog: pytest.LogCaptureFixture
) -> None:
    for route in (make_route("mortal"), *make_routes(2, "twin")):
        client.put(route)
    eventually(lambda: not client.list("prefill"), "the silent route is gone")
    assert client.get(make_route("mortal").key) is None
    eventually(lambda: "fell silent" in caplog.text, "the silence is logged")
    assert (
        "no longer listed: prefill instance twin (2 ranks), prefill instance mortal (1 ranks)" in caplog.text
    )


def test_a_registrar_keeps_its_ranks_listed_and_takes_them_back(client: BootstrapClient) -> None:
    routes = make_routes(3)
    registrar = Registrar(client.address, routes, interval=0.05)
    registrar.start()
    eventually(lambda: registrar.registered, "registered")
    assert client.list("prefill") == routes
    registrar.close()
    assert client.list("prefill") == []
    registrar.close()


@pytest.mark.parametrize("ttl", [2.0])
def test_a_registrar_outlives_the_ttl_by_heartbeats(client: BootstrapClient) -> None:
    with contextlib.closing(Registrar(client.address, [make_route("alive")], interval=60.0)) as alive:
        alive.start()
        eventually(lambda: alive.registered, "registered")
        for generation in range(2):
            # One that does not renew shows that a whole ttl has gone by.
            client.put(make_route(f"mortal-{generation}"))
            eventually(lambda: len(client.list("prefill")) < 2, "the silent one is gone")
            assert [route.instance_id for route in client.list("prefill")] == ["alive"]


def test_a_restarted_server_is_refilled_and_each_change_is_logged_once(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sgl_pd_connector.bootstrap.heartbeat")
    server = HTTPBootstrapServer(host, 0)
    server.start()
    routes = make_routes(3)
    registrar = Registrar(server.address, routes, interval=0.05)
    registrar.start()
    try:
        eventually(lambda: registrar.registered, "registered")
        server.stop()
        eventually(lambda: registrar.status is RegistrationStatus.UNREACHABLE, "noticed")
        server = HTTPBootstrapServer(host, server.address.port)
        server.start()
        with BootstrapClient(server.address) as client:
            eventually(lambda: len(client.list("prefill")) == 3, "refilled")
            eventually(lambda: registrar.registered, "registered again")
    finally:
        registrar.close()
        server.stop()
    said = [
        "unreachable" if "does not answer" in text else "forgotten" if "forgotten" in text else "registered"
        for text in caplog.messages
    ]
    assert said == ["registered", "unreachable", "forgotten", "registered"]


def test_a_registrar_waits_for_a_server_that_starts_later(host: str) -> None:
    server = HTTPBootstrapServer(host, 0)
    server.start()
    address = server.address
    server.stop()
    registrar = Registrar(address, [make_route()], interval=0.05)
    registrar.start()
    eventually(lambda: registrar.status is RegistrationStatus.UNREACHABLE, "noticed")
    late = HTTPBootstrapServer(address.host, address.port)
    late.start()
    eventually(lambda: registrar.registered, "registered")
    registrar.close()
    late.stop()


def test_a_registrar_without_the_secret_says_so_and_keeps_trying(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = HTTPBootstrapServer(host, 0, auth_token="secret")
    server.start()
    registrar = Registrar(server.address, [make_route()], interval=0.05)
    registrar.start()
    eventually(lambda: registrar.status is RegistrationStatus.REFUSED, "refused")
    registrar.close()
    server.stop()
    assert "shared secret" in caplog.text


def test_a_registrar_that_was_never_started_closes(server: HTTPBootstrapServer) -> None:
    Registrar(server.address, [make_route()]).close()


@pytest.mark.parametrize("host", ["127.0.0.1"])
@pytest.mark.parametrize("ttl", [120.0])
def test_ten_thousand_ranks_are_renewed_found_and_listed(server: HTTPBootstrapServer, ttl: float) -> None:
    instances = [make_routes(1000, f"prefill-{n}") for n in range(10)]
    with contextlib.closing(http.client.HTTPConnection(server.address.host, server.address.port)) as http_:
        for route in itertools.chain(*instances):
            http_.request("PUT", "/route", route.wire_json, {"Content-Type": "application/json"})
            with http_.getresponse() as response:
                assert response.status == 200, response.read()
                response.read()
    with BootstrapClient(server.address, timeout=60.0) as client:
        for routes in instances:
            ranks = [route.rank for route in routes]
            beat = Heartbeat(role="prefill", instance_id=routes[0].instance_id, epoch=1, ranks=ranks)
            assert client.heartbeat(beat) == HeartbeatReply(ttl=ttl)
        assert client.health().prefill == 10_000
        assert client.get(instances[7][999].key) == instances[7][999]
        assert client.list("prefill") == list(itertools.chain(*instances))
