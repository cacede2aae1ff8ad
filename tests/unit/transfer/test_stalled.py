"""A peer that takes nothing is cut off, others are not."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from sgl_pd_connector.transfer.own_sockets import listening_ports
from sgl_pd_connector.transfer.stalled import StallWatch

pytestmark = pytest.mark.unit

LIMIT = 10.0


class Served:
    """A connection to a listener of this process, as both ends see it."""

    def __init__(self, listener: socket.socket) -> None:
        self.peer = socket.create_connection(listener.getsockname())
        self.own, _ = listener.accept()

    def send_until_full(self) -> None:
        self.own.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.own.send(bytes(1 << 20))

    def take(self, count: int) -> None:
        while count > 0:
            count -= len(self.peer.recv(min(count, 1 << 20)))

    def take_everything(self) -> None:
        """Until nothing is on the way any more."""
        self.peer.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while self.peer.recv(1 << 20):
                pass

    @property
    def is_open(self) -> bool:
        try:
            self.own.send(b"x")
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return True

    def close(self) -> None:
        self.peer.close()
        self.own.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def watch(listener: socket.socket) -> StallWatch:
    return StallWatch({listener.getsockname()[1]}, LIMIT)


@pytest.fixture
def connection(listener: socket.socket) -> Iterator[Served]:
    served = Served(listener)
    yield served
    served.close()


def test_ports_are_those_that_listen(listener: socket.socket, connection: Served) -> None:
    assert listener.getsockname()[1] in listening_ports()
    assert connection.peer.getsockname()[1] not in listening_ports()


def test_a_peer_that_takes_nothing_is_cut_off(watch: StallWatch, connection: Served) -> None:
    connection.send_until_full()
    assert watch.look(0.0) == 0
    assert watch.look(LIMIT) == 0
    assert connection.is_open
    assert watch.look(LIMIT + 1) == 1
    assert not connection.is_open
    assert [watch.look(LIMIT + later) for later in (2, 100)] == [0, 0], "once"


def test_a_slow_peer_is_not(watch: StallWatch, connection: Served) -> None:
    connection.send_until_full()
    for now in range(0, 100, 5):
        assert watch.look(now) == 0
        connection.take(1 << 20)
        connection.send_until_full()
    assert connection.is_open


def test_nor_is_one_to_which_nothing_is_sent(watch: StallWatch, connection: Served) -> None:
    for now in (0.0, 100.0, 200.0):
        assert watch.look(now) == 0
    assert connection.is_open


def test_nor_one_of_another_port(connection: Served) -> None:
    watch = StallWatch({1}, LIMIT)
    connection.send_until_full()
    assert [watch.look(now) for now in (0.0, 100.0)] == [0, 0]
    assert connection.is_open


def test_a_stall_that_ended_does_not_count(watch: StallWatch, connection: Served) -> None:
    connection.send_until_full()
    watch.look(0.0)
    connection.take_everything()
    assert watch.look(LIMIT - 1) == 0
    assert watch.look(LIMIT + 1) == 0
