"""A transport and arrays that do what a test says, when it says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sgl_pd_connector.transfer.pool import PoolWrite
from sgl_pd_connector.transfer.transport import Peer


def wait_until(condition: Callable[[], object], what: str = "", timeout: float = 20.0) -> None:
    """Waits for a condition that another thread brings about."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what or condition}"
        time.sleep(0.0005)


class FakeArray:
    """An array still on its way, until `arrive` or `break_off`."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._error: Exception | None = None

    def arrive(self) -> None:
        self._ready.set()

    def break_off(self, text: str = "connection reset") -> None:
        self._error = RuntimeError(text)
        self._ready.set()

    def is_ready(self) -> bool:
        return self._ready.is_set()

    def block_until_ready(self) -> FakeArray:
        assert self.is_ready(), "nobody may block on an array that is not ready"
        if self._error is not None:
            raise self._error
        return self


class FakeLink:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.pulls: dict[int, list[FakeArray]] = {}
        self.is_retired = False
        self.is_cut = False
        self.whole = True
        self.unlookable: OSError | None = None
        self.pull_error: Exception | None = None

    def pull(self, uuid: int, specs: Sequence[Any]) -> list[Any]:
        assert not self.is_cut, "a link that was cut is not used again"
        if self.pull_error is not None:
            raise self.pull_error
        assert uuid not in self.pulls, "a uuid is pulled once"
        self.pulls[uuid] = [FakeArray() for _ in specs]
        return list(self.pulls[uuid])

    def retire(self) -> None:
        assert not self.is_retired, "a link is retired once"
        self.is_retired = True
        self._look()

    def is_whole(self) -> bool:
        self._look()
        return self.whole

    def _look(self) -> None:
        if self.unlookable is not None:
            raise self.unlookable

    def cut(self) -> None:
        assert self.is_retired
        assert not self.is_cut, "a link is cut once"
        self.is_cut = True
        for arrays in self.pulls.values():
            for array in arrays:
                if not array.is_ready():
                    array.break_off("cut")


class FakeTransport:
    """D's side of one."""

    def __init__(self) -> None:
        self.links: list[FakeLink] = []
        self.pull_error: Exception | None = None
        self.link_error: Exception | None = None

    def link(self, peer: Peer) -> FakeLink:
        if self.link_error is not None:
            raise self.link_error
        link = FakeLink(peer)
        link.pull_error = self.pull_error
        self.links.append(link)
        return link

    def register(self, uuid: int, buffers: Sequence[Any], lifetime: float) -> None:
        raise AssertionError("a decode instance registers nothing")

    def release(self, uuid: int) -> None:
        raise AssertionError("a decode instance releases nothing")

    def sweep(self) -> None: ...

    def arrays(self, uuid: int) -> list[FakeArray]:
        """The arrays of a pull; waits until it was started."""
        wait_until(lambda: self.started(uuid), f"pull of {uuid}")
        return next(link.pulls[uuid] for link in self.links if uuid in link.pulls)

    def started(self, uuid: int) -> bool:
        return any(uuid in link.pulls for link in self.links)

    def arrive(self, *uuids: int) -> None:
        for uuid in uuids:
            for array in self.arrays(uuid):
                array.arrive()


class FakeWriter:
    """Collects writes; a test carries them out."""

    def __init__(self) -> None:
        self.queued: list[PoolWrite] = []
        self.carried_out: list[PoolWrite] = []

    def put(self, write: PoolWrite) -> None:
        self.queued.append(write)

    def dispatch(self) -> list[FakeArray]:
        """Like the engine's step; returns the tokens of the writes, which are not ready yet."""
        writes, self.queued = self.queued, []
        for write in writes:
            write.token = FakeArray()  # type: ignore[assignment]
        self.carried_out += writes
        return [write.token for write in writes]  # type: ignore[misc]

    def write_all(self, count: int) -> None:
        """Carries out ``count`` writes, each as soon as it is queued."""
        for _ in range(count):
            wait_until(lambda: self.queued, "a write")
            write = self.queued.pop(0)
            token = FakeArray()
            token.arrive()
            write.token = token  # type: ignore[assignment]
            self.carried_out.append(write)
