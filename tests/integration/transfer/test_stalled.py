"""A D that stops in the middle of a transfer, for good or for a while, and P's other Ds."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.engine_pair import EnginePair, EngineProcess, Moved, ToyPool, free_port
from tests.waiting import eventually

pytestmark = pytest.mark.integration

PEER_TIMEOUT = 3.0
SETTINGS = {
    "max_chunk_pages": 8,
    "max_pulled_bytes": 512 << 20,
    "peer_timeout": PEER_TIMEOUT,
    # Only P's watch over its sockets is to help.
    "lease": 60.0,
    "transfer_timeout": 60.0,
}
TOKENS = 64 * 60  # 120 MB


class ManyDs(EnginePair):
    """A pair whose `d` changes."""

    def __init__(self) -> None:
        pool = ToyPool(num_layers=16, page_size=64, token_shape=(8, 128))
        self._port = free_port()
        super().__init__(pool, SETTINGS | {"transfer_port": self._port}, SETTINGS)

    def pulling(self) -> Moved:
        moved = self.request(TOKENS)
        moved.pull()
        return moved

    def stopped_in_the_middle(self) -> tuple[EngineProcess, Moved]:
        """A D on the way to which there is data of this transfer, and that does not take it."""
        self.pulling().finish()
        moved = self.request(TOKENS)
        moved.offer()
        # P answers D's pulls, which have reached it, when D has stopped: more than the kernels keep in between.
        self.p.stop()
        moved.receiver.receive(moved.d_pages)
        eventually(lambda: self.d.stats()["pulled_bytes"], "D's first pull")
        eventually(lambda: queued(self.p).unread.get(self._port), "a pull at P's transfer server")
        self.d.stop()
        self.p.resume()
        eventually(lambda: unsent(self.p), "data that D does not take")
        return self.d, moved


@pytest.fixture
def pair() -> Iterator[ManyDs]:
    with ManyDs() as pair:
        yield pair


class Queued(NamedTuple):
    """Bytes in the kernel's queues of a process's open TCP connections."""

    unsent: int
    unread: dict[int, int]
    """By local port."""


def queued(process: EngineProcess) -> Queued:
    pid = process.pid
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(fd))
    unsent, unread = 0, Counter[int]()
    for line in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]):
        # As in proc(5), in hexadecimal but for the inode; state 1 is ESTABLISHED.
        if line[3] == "01" and f"socket:[{line[9]}]" in own:
            to_send, to_read = (int(number, 16) for number in line[4].split(":"))
            unsent += to_send
            unread[int(line[1].rpartition(":")[2], 16)] += to_read
    return Queued(unsent, unread)


def unsent(process: EngineProcess) -> int:
    """Bytes that the other ends of the process's open TCP connections do not take."""
    time.sleep(0.3)  # what they take is gone by then
    return queued(process).unsent


def test_p_goes_on_serving_another_d(pair: ManyDs) -> None:
    stopped, stalled = pair.stopped_in_the_middle()
    pair.restart_d()
    began = time.monotonic()
    served = pair.pulling()
    served.finish(within=PEER_TIMEOUT + 12.0)
    assert pair.d.digests(served.d_pages) == pair.p.digests(served.p_pages)
    assert stalled.sender.state == "Transferring", "P still waits for the other"
    # From then on it is as fast as if there were no other.
    for _ in range(3):
        pair.pulling().finish(within=PEER_TIMEOUT)
    assert time.monotonic() - began < SETTINGS["lease"]
    stopped.resume()
    stalled.receiver.wait("Failed", "Success")


def test_a_d_that_goes_on_gets_the_rest(pair: ManyDs) -> None:
    stopped, stalled = pair.stopped_in_the_middle()
    eventually(lambda: not unsent(pair.p), "P gives the connection up")
    stopped.resume()
    stalled.finish()
    assert pair.d.digests(stalled.d_pages) == pair.p.digests(stalled.p_pages)


def test_what_a_dead_d_left_behind_holds_up_nobody(pair: ManyDs) -> None:
    stopped, _ = pair.stopped_in_the_middle()
    eventually(lambda: not unsent(pair.p), "P gives the connection up")
    stopped.kill()
    pair.restart_d()
    pair.pulling().finish()
