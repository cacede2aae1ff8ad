"""Requests in every state that a fault can meet them in, and what drives them to their end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.rooms import prompt_digest
from tests.faults.scene import CHUNK_PAGES, PAGE_BYTES, POOL, PULLED_PAGES, Scene
from tests.support.engine_pair import Transfer
from tests.waiting import eventually

STATES = {
    "queued": 2,
    "bootstrapping": 3,
    "prefilling": 5,
    "registered": 9,
    "pulling": 1,
    "mid-chunk": 5 * CHUNK_PAGES,
    "pulled-not-acked": 4,
    "decoding": 6,
}
"""Pages of the request that is brought into each state."""

OVER = ("Success", "Failed")


@dataclass
class Side:
    """P's or D's half of a request.

    Attributes:
        state, error, over_after: the last ones seen; seconds from `Request.began`.
        lost: whether its process was killed.
    """

    transfer: Transfer | None = None
    state: str = ""
    error: str = ""
    over_after: float | None = None
    lost: bool = False

    @property
    def over(self) -> bool:
        return self.lost or self.state in OVER


@dataclass
class Request:
    """One request, its pages, and what became of it."""

    name: str
    room: int
    p_pages: list[int]
    d_pages: list[int]
    p: Side = field(default_factory=Side)
    d: Side = field(default_factory=Side)
    sent: bool = False
    received: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return self.p.over and self.d.over

    @property
    def num_tokens(self) -> int:
        # Its last page is not full.
        return len(self.p_pages) * POOL.page_size - 1

    def open_p(self, scene: Scene) -> None:
        self.p.transfer = scene.p.sender(
            f"s{self.room}", self.room, prompt_digest([self.room]), self.num_tokens
        )

    def open_d(self, scene: Scene) -> None:
        prompt = prompt_digest([self.room])
        self.d.transfer = scene.d.receiver(
            f"r{self.room}", self.room, prompt, self.num_tokens, scene.view.address
        )

    def send(self) -> None:
        assert self.p.transfer is not None
        self.sent = True
        self.p.transfer.send(self.p_pages)

    def receive(self) -> None:
        assert self.d.transfer is not None
        self.received = True
        self.d.transfer.receive(self.d_pages)

    def wait_d(self, *states: str) -> None:
        assert self.d.transfer is not None
        self.d.transfer.wait(*states)

    def wait_p(self, *states: str) -> None:
        assert self.p.transfer is not None
        self.p.transfer.wait(*states)

    def look(self, scene: Scene) -> None:
        """Asks the processes that live how it stands, and does what an engine would do next."""
        for side, role in ((self.p, "P"), (self.d, "D")):
            if side.over or not scene.lives(role):
                continue
            if side.transfer is None:
                (self.open_p if role == "P" else self.open_d)(scene)
            assert side.transfer is not None
            answer = side.transfer.poll()
            side.state, side.error = answer["state"], answer["error"] or ""
            if side.over:
                side.over_after = time.monotonic() - self.began
        if scene.lives("P") and not self.p.over and not self.sent:
            self.send()
        if scene.lives("D") and self.d.state == "WaitingForInput" and not self.received:
            self.receive()


def new_request(scene: Scene, name: str, first_page: int, count: int) -> Request:
    p_pages = list(range(first_page, first_page + count))
    d_pages = [POOL.num_pages - 1 - page for page in p_pages]
    return Request(name, scene.next_room(), p_pages, d_pages)


def place(scene: Scene) -> list[Request]:
    """One request in each state, all at once; at the end D's engine stands still and the network holds transfers back.

    The proxies must exist: a request must have passed before.
    """
    requests: dict[str, Request] = {}
    first = 0
    for name, count in STATES.items():
        requests[name] = new_request(scene, name, first, count)
        first += count
    assert first <= POOL.num_pages
    side_channel = scene.view.side_channel
    side_channel.withhold(msg.Done, requests["pulled-not-acked"].room)
    for name in ("pulled-not-acked", "decoding"):
        request = requests[name]
        request.open_p(scene)
        request.open_d(scene)
        request.send()
        request.wait_d("WaitingForInput")
        request.receive()
        request.wait_d("Success")
    requests["decoding"].wait_p("Success")
    eventually(lambda: side_channel.num_withheld > 0, "DONE on its way")
    for name in ("registered", "mid-chunk", "pulling"):
        request = requests[name]
        request.open_p(scene)
        request.open_d(scene)
        request.send()
        request.wait_d("WaitingForInput")
    requests["prefilling"].open_p(scene)
    requests["prefilling"].open_d(scene)
    requests["prefilling"].wait_p("WaitingForInput")
    requests["bootstrapping"].open_d(scene)
    requests["queued"].open_p(scene)
    scene.d.stepping(False)
    requests["mid-chunk"].receive()
    full = (PULLED_PAGES - 1) * PAGE_BYTES
    eventually(lambda: scene.d.stats()["pulled_bytes"] == full, "all but the last chunk")
    for proxy in scene.view.transfers.values():
        proxy.hold()
    requests["pulling"].receive()
    began = time.monotonic()
    for request in requests.values():
        request.began = began
    return list(requests.values())


def let_go(scene: Scene) -> None:
    """The network delivers what `place` held back; D's engine steps, now or when it can again."""
    for proxy in scene.view.transfers.values():
        proxy.let_go()
    for side_channel in scene.view.side_channels.values():
        if "D" in scene.dead:
            side_channel.discard()
        else:
            side_channel.hand_on()
    if scene.lives("D"):
        scene.d.stepping(True)


def drive(scene: Scene, requests: list[Request], seconds: float, *, to_the_end: bool = True) -> None:
    """Lets both engines go on with them for so long; ``to_the_end``: or until all that can be asked are over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not (to_the_end and all(request.over for request in requests)):
        for request in requests:
            request.look(scene)
        time.sleep(0.01)
