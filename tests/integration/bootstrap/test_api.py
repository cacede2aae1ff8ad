"""Every endpoint over a real socket, and what is answered to requests that are wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
from sgl_pd_connector.wire.routes import (
    MAX_BODY_BYTES,
    Health,
    Heartbeat,
    HeartbeatReply,
    Rank,
    Registered,
)
from tests.registrations import PAYLOAD, make_route

pytestmark = pytest.mark.integration

QUERY = {"role": "prefill", "instance_id": "prefill-0"}
BEAT: dict[str, Any] = {"role": "prefill", "instance_id": "prefill-0", "epoch": 1, "ranks": [[0, 0, 0, 0]]}


@pytest.fixture
def http(server: HTTPBootstrapServer) -> Iterator[httpx.Client]:
    """What any HTTP client sees, without our own client's checks."""
    with httpx.Client(base_url=server.address.url(), trust_env=False) as http:
        yield http


def test_a_route_is_put_found_listed_and_deleted(client: BootstrapClient) -> None:
    route, other = make_route(rank=Rank(1, 2, 3, 4)), make_route("decode-0", role="decode")
    assert client.put(route) == Registered(ttl=15.0, replaced=False)
    client.put(other)
    assert client.get(route.key) == route
    assert client.get(make_route(rank=Rank(1, 2, 3, 5)).key) is None
    assert client.list("prefill") == [route]
    assert client.list("decode") == [other]
    assert client.health() == Health(prefill=1, decode=1, ttl=15.0)
    assert client.delete(route.key) is True
    assert client.delete(route.key) is False
    assert client.list("prefill") == []


def test_a_new_epoch_replaces_the_old_one_and_outlives_its_goodbye(client: BootstrapClient) -> None:
    old, new = make_route(epoch=1), make_route(epoch=2, transfer_addr="[fd00::5]:7")
    client.put(old)
    assert client.put(new).replaced is True
    assert client.delete(old.key, epoch=1) is False
    assert client.get(old.key) == new


def test_a_heartbeat_tells_which_ranks_to_register_again(client: BootstrapClient) -> None:
    known, lost, foreign = (Rank(tp, 0, 0, 0) for tp in range(3))
    client.put(make_route(rank=known))
    client.put(make_route(rank=foreign, epoch=2))
    beat = Heartbeat(role="prefill", instance_id="prefill-0", epoch=1, ranks=[known, lost, foreign])
    assert client.heartbeat(beat) == HeartbeatReply(unknown=[lost], superseded=[foreign], ttl=15.0)


def test_plain_json_is_all_a_client_needs(http: httpx.Client) -> None:
    assert http.put("/route", json=PAYLOAD).json() == {"ttl": 15.0, "replaced": False}
    ranks = {name: PAYLOAD[name] for name in ("tp_rank", "cp_rank", "dp_rank", "pp_rank")}
    assert http.get("/route", params=QUERY | ranks).json() == PAYLOAD
    assert http.get("/list", params={"role": "prefill"}).json() == {"routes": [PAYLOAD]}
    assert http.post("/heartbeat", json=BEAT).json() == {
        "unknown": [[0, 0, 0, 0]],
        "superseded": [],
        "ttl": 15.0,
    }
    assert http.delete("/route", params=QUERY | ranks).json() == {"deleted": True}
    assert http.get("/health").json() == {"status": "ok", "prefill": 0, "decode": 0, "ttl": 15.0}


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "field"),
    [
        ("PUT", "/route", {"json": {k: v for k, v in PAYLOAD.items() if k != "zmq_addr"}}, 422, "zmq_addr"),
        ("PUT", "/route", {"json": PAYLOAD | {"page_size": "16"}}, 422, "page_size"),
        ("PUT", "/route", {"json": PAYLOAD | {"tp_rank": 4}}, 422, "tp_rank"),
        ("PUT", "/route", {"json": PAYLOAD | {"transfer_addr": "0.0.0.0:1"}}, 422, "transfer_addr"),
        ("PUT", "/route", {"json": [PAYLOAD]}, 422, None),
        ("PUT", "/route", {}, 422, None),
        ("PUT", "/route", {"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, None),
        ("PUT", "/route", {"content": b"\xff{}", "headers": {"Content-Type": "application/json"}}, 400, None),
        (
            "PUT",
            "/route",
            {"content": b"[" * 60_000, "headers": {"Content-Type": "application/json"}},
            400,
            None,
        ),
        ("POST", "/heartbeat", {"json": BEAT | {"ranks": []}}, 422, "ranks"),
        ("POST", "/heartbeat", {"json": BEAT | {"ranks": [[0, 0, 0, "x"]]}}, 422, "ranks.0.3"),
        ("GET", "/list", {}, 422, "role"),
        ("GET", "/list", {"params": {"role": "router"}}, 422, "role"),
        ("GET", "/route", {"params": {"role": "prefill"}}, 422, "instance_id"),
        ("GET", "/route", {"params": QUERY | {"tp_rank": "one"}}, 422, "tp_rank"),
        ("GET", "/route", {"params": QUERY}, 404, "instance_id"),
        ("DELETE", "/route", {"params": QUERY | {"epoch": "-1"}}, 422, "epoch"),
        ("GET", "/nowhere", {}, 404, None),
        ("POST", "/route", {"json": PAYLOAD}, 405, None),
    ],
)
def test_a_wrong_request_is_refused_with_its_field_named(
    http: httpx.Client, *, method: str, path: str, sent: dict[str, Any], status: int, field: str | None
) -> None:
    response = http.request(method, path, **sent)
    assert response.status_code == status
    answer = response.json()
    assert set(answer) == {"error", "field"}
    assert answer["field"] == field
    assert field is None or field in answer["error"] or status == 404
    assert len(answer["error"]) < 300
    assert http.get("/health").json()["prefill"] == 0


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_64_kib_is_answered_413(http: httpx.Client, chunked: bool) -> None:
    body = b'{"role": "' + b"x" * MAX_BODY_BYTES + b'"}'
    response = http.put("/route", content=iter([body[:1000], body[1000:]]) if chunked else body)
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in response.json()["error"]
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 70_000,
        b"GET",
        b"GET /health HTTP/1.1\r\n" + b"x" * 70_000,
        b"PUT /route HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{",
        b"PUT /route HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n",
        b"PUT /route HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=lambda junk: repr(junk[:20]),
)
def test_junk_on_the_socket_hurts_nobody_else(
    server: HTTPBootstrapServer, client: BootstrapClient, junk: bytes
) -> None:
    client.put(make_route())
    with socket.create_connection((server.address.host, server.address.port)) as connection:
        connection.sendall(junk)
        assert client.health().prefill == 1
    assert client.health().prefill == 1
    assert server.poll()


def test_the_secret_is_asked_of_everyone_but_a_health_probe(host: str) -> None:
    server = HTTPBootstrapServer(host, 0, auth_token="correct horse")
    server.start()
    try:
        with httpx.Client(base_url=server.address.url(), trust_env=False) as http:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic correct horse"}):
                response = http.put("/route", json=PAYLOAD, headers=headers)
                assert response.status_code == 401
                assert response.json()["field"] == "Authorization"
                assert "correct horse" not in response.text
            assert http.get("/health").json()["prefill"] == 0
        with BootstrapClient(server.address, auth_token="correct horse") as client:
            client.put(make_route())
            assert len(client.list("prefill")) == 1
    finally:
        server.stop()
