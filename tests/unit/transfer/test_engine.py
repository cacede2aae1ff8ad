from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import pytest

from sgl_pd_connector.transfer.engine import MIN_LIFETIME, RELEASED_LIFETIME, JaxTransferKVEngine

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
