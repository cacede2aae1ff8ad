"""The registrar's thread, at a client that does what no client should."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from sgl_pd_connector.bootstrap import heartbeat
from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.bootstrap.heartbeat import Registrar
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.routes import Heartbeat, HeartbeatReply, Registered, Route, RouteKey
from tests.registrations import make_route
from tests.waiting import eventually

pytestmark = pytest.mark.unit


class FaultyClient(BootstrapClient):
    """Raises what it is given first, then answers."""

    errors: Iterator[Exception]
    goodbye: Exception | None = None

    def put(self, route: Route) -> Registered:
        for error in self.errors:
            raise error
        return Registered(ttl=15.0, replaced=False)

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        return HeartbeatReply(ttl=15.0)

    def delete(self, key: RouteKey, epoch: int | None = None) -> bool:
        if self.goodbye is not None:
            raise self.goodbye
        return True


@pytest.fixture
def registrar(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registrar]:
    monkeypatch.setattr(heartbeat, "BootstrapClient", FaultyClient)
    with contextlib.closing(Registrar(Address("127.0.0.1", 1), [make_route()], interval=0.01)) as registrar:
        yield registrar


def test_no_error_ends_it_and_each_kind_is_logged_once(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [OverflowError("first"), OverflowError("second"), KeyError("third")]
    monkeypatch.setattr(FaultyClient, "errors", iter(errors), raising=False)
    registrar.start()
    eventually(lambda: registrar.registered, "registered after all")
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info is not None]
    assert logged == [errors[0], errors[2]]


def test_stop_does_not_wait_for_a_server_that_hangs(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, answer = threading.Event(), threading.Event()

    def hang(client: BootstrapClient, route: Route) -> Registered:
        called.set()
        assert answer.wait(30)
        return Registered(ttl=15.0, replaced=False)

    deleted: list[RouteKey] = []
    monkeypatch.setattr(FaultyClient, "put", hang)
    monkeypatch.setattr(FaultyClient, "delete", lambda client, key, epoch: deleted.append(key))
    registrar.start()
    assert called.wait(30)
    registrar.stop()
    assert not deleted
    answer.set()
    registrar.close()
    assert deleted == [make_route().key]


def test_nor_does_one_at_the_goodbye(registrar: Registrar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultyClient, "errors", iter(()), raising=False)
    monkeypatch.setattr(FaultyClient, "goodbye", OverflowError("last"))
    registrar.start()
    eventually(lambda: registrar.registered, "registered")
    registrar.close()
