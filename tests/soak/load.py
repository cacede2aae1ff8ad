"""Random requests on a scene, some of them made to fail; every success is compared byte for byte."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.faults.requests import Request
from tests.faults.scene import LONGEST, POOL, Scene

AT_ONCE = 6
LONGEST_PROMPT = POOL.num_pages // AT_ONCE
INJECTED = 0.05
"""Of all requests: P or D meets an error of its own, or the connection breaks."""
DISCONNECTS = 0.10
"""Of all requests: the client leaves, at any moment."""
LATE = LONGEST + 15.0
"""Seconds after which a request that is not over hangs."""


@dataclass
class Running:
    """A request and what is to happen to it."""

    request: Request
    event: str
    at: float


@dataclass
class Outcome:
    """Counts of what happened, and everything that must not.

    Attributes:
        ended: requests by how D saw their end: ``"ok"``, ``"failed"``, ``"lost"`` with its process.
        events: what was done to them.
    """

    ended: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    wrong_bytes: int = 0
    hangs: list[str] = field(default_factory=list)
    bystanders: list[str] = field(default_factory=list)
    """Requests that failed although nothing was done to them, to their peer or to the network."""


class Load:
    """Keeps a few requests under way. Driven by `turn`."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self._scene = scene
        self._random = random.Random(seed)
        self._expected = scene.p.digests(range(POOL.num_pages))
        self._free = list(range(POOL.num_pages))
        self._running: list[Running] = []
        self._disturbed_until = 0.0
        self.outcome = Outcome()

    def turn(self, *, new: bool = True) -> None:
        """Starts what fits, if ``new``, and lets everything go on by one step."""
        while new and len(self._running) < AT_ONCE:
            self._start()
        now = time.monotonic()
        for running in list(self._running):
            if running.event and now >= running.at and not running.request.over:
                self._strike(running)
            running.request.look(self._scene)
            if running.request.over or now - running.request.began > LATE:
                self._finish(running)
        time.sleep(0.002)

    def drain(self) -> None:
        """Lets everything come to its end."""
        while self._running:
            self.turn(new=False)

    def lost(self, role: str) -> None:
        """That process was killed; its successor is there."""
        self._disturbed_until = time.monotonic() + LONGEST
        for running in self._running:
            side = running.request.p if role == "P" else running.request.d
            side.lost |= side.transfer is not None

    def _start(self) -> None:
        choose = self._random
        count = choose.randint(1, min(LONGEST_PROMPT, len(self._free)))
        choose.shuffle(self._free)
        d_pages, self._free = self._free[:count], self._free[count:]
        p_pages = choose.sample(range(POOL.num_pages), count)
        event = ""
        fate = choose.random()
        if fate < INJECTED:
            event = choose.choice(("bad page on P", "bad page on D", "P aborts", "connection breaks"))
        elif fate < INJECTED + DISCONNECTS:
            event = "client leaves"
        request = Request("soak", self._scene.next_room(), p_pages, d_pages)
        if event == "bad page on P":
            request.p_pages[-1] = POOL.num_pages
        elif event == "bad page on D":
            request.d_pages = [*d_pages[:-1], POOL.num_pages]
            self._free.append(d_pages[-1])
        self.outcome.events[event or "none"] += 1
        self._running.append(Running(request, event, time.monotonic() + choose.uniform(0.0, 0.1)))

    def _strike(self, running: Running) -> None:
        request, event = running.request, running.event
        running.event = ""
        if event == "P aborts" and request.p.transfer is not None and not request.p.over:
            request.p.transfer.abort("the engine preempted it")
        elif event == "client leaves":
            for side in (request.p, request.d):
                if side.transfer is not None and not side.over:
                    side.transfer.abort("client gone")
        elif event == "connection breaks":
            self._scene.p.cut_transfers([self._scene.identity["P"]["side_channel_port"]])
            self._disturbed_until = time.monotonic() + 1.0
        else:
            return
        request.name = "struck"

    def _finish(self, running: Running) -> None:
        request = running.request
        self._running.remove(running)
        self._free += [page for page in request.d_pages if page < POOL.num_pages]
        if not request.over:
            self.outcome.hangs.append(f"room {request.room}: P {request.p.state}, D {request.d.state}")
        elif request.d.lost:
            self.outcome.ended["lost"] += 1
        elif request.d.state == "Success":
            self.outcome.ended["ok"] += 1
            if self._scene.d.digests(request.d_pages) != [self._expected[page] for page in request.p_pages]:
                self.outcome.wrong_bytes += 1
        else:
            self.outcome.ended["failed"] += 1
            untouched = request.name != "struck" and max(request.p_pages + request.d_pages) < POOL.num_pages
            if untouched and request.began > self._disturbed_until and not request.p.lost:
                self.outcome.bystanders.append(request.d.error)
        for side in (request.p, request.d):
            if side.transfer is not None and not side.lost:
                side.transfer.forget()
