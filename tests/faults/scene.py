"""Prefill, decode and bootstrap process with a network between them that can be cut."""

from __future__ import annotations

import itertools
import signal
from typing import Any, Self

from tests.faults.bootstrap_view import BootstrapView
from tests.faults.network import Network, Proxy
from tests.support.engine_pair import EngineProcess, ToyPool, free_port

CHUNK_PAGES = 4
POOL = ToyPool()
PAGE_BYTES = 512
PULLED_PAGES = 4 * CHUNK_PAGES + 1
"""What D may hold: of a long prompt all but the last chunk, and one page of another."""

DEADLINES = {
    "peer_timeout": 2.5,
    "lease": 2.5,
    "bootstrap_timeout": 3.0,
    "prefill_timeout": 4.0,
    "transfer_timeout": 3.0,
}
SETTINGS = DEADLINES | {
    "max_chunk_pages": CHUNK_PAGES,
    "max_pulled_bytes": PULLED_PAGES * PAGE_BYTES,
    "heartbeat_interval": 0.3,
    "heartbeat_ttl": 1.5,
}
LONGEST = DEADLINES["bootstrap_timeout"] + DEADLINES["prefill_timeout"] + DEADLINES["transfer_timeout"]
"""No request may live longer: the longest way is through all three."""

SOCKET_IDLE = 8.0
CONSTANTS = {"sgl_pd_connector.transfer.decode_channel.SOCKET_IDLE": SOCKET_IDLE}

SECRET = "shared by P and D of a signed scene"

ROLES = ("P", "D", "bootstrap")


class Scene:
    """Three processes and their network. Entering it starts them."""

    def __init__(self, *, secret: str | None = None) -> None:
        """``secret``: what they sign messages with."""
        self._settings = SETTINGS if secret is None else SETTINGS | {"secret": secret}

    def __enter__(self) -> Self:
        self._rooms = itertools.count(1)
        self._names = itertools.count(1)
        self._ended: list[EngineProcess] = []
        self.stopped: set[str] = set()
        self.dead: set[str] = set()
        self.identity: dict[str, dict[str, Any]] = {}
        self.network = Network()
        self.processes: dict[str, EngineProcess] = {
            "bootstrap": EngineProcess("bootstrap", config=SETTINGS).ready()
        }
        address = self.processes["bootstrap"].bootstrap
        self._bootstrap_port = int(address.rpartition(":")[2])
        self.view = BootstrapView(self.network, address)
        self.heartbeats = Proxy(self.network, address)
        """How P reaches the bootstrap server."""
        for role in ("P", "D"):
            self.processes[role] = self._new(role, self._other_identity(role))
        self.p.ready()
        self.d.ready()
        return self

    def __exit__(self, *_: object) -> None:
        processes = [*self._ended, *(self.processes[role] for role in ("D", "P", "bootstrap"))]
        statuses = [(process.role, process.close()) for process in processes]
        self.network.close()
        bad = [(role, status) for role, status in statuses if status not in (0, -signal.SIGKILL)]
        assert not bad, f"did not end in order: {bad}"

    @property
    def p(self) -> EngineProcess:
        return self.processes["P"]

    @property
    def d(self) -> EngineProcess:
        return self.processes["D"]

    def lives(self, role: str) -> bool:
        """Whether it can be asked."""
        return role not in self.stopped and role not in self.dead

    def next_room(self) -> int:
        return next(self._rooms)

    # What can be done to a process.

    def kill(self, role: str) -> None:
        self.processes[role].kill()
        self.dead.add(role)

    def stop(self, role: str) -> None:
        self.processes[role].stop()
        self.stopped.add(role)

    def resume(self, role: str) -> None:
        self.processes[role].resume()
        self.stopped.discard(role)

    def start(self, role: str, *, same_address: bool) -> None:
        """A successor of a process that was killed."""
        self._ended.append(self.processes[role])
        if role == "bootstrap":
            assert same_address, "its address is what the others are configured with"
            new = EngineProcess("bootstrap", port=self._bootstrap_port, config=SETTINGS)
        else:
            new = self._new(role, self.identity[role] if same_address else self._other_identity(role))
        self.processes[role] = new.ready()
        self.dead.discard(role)

    def _new(self, role: str, identity: dict[str, Any]) -> EngineProcess:
        self.identity[role] = identity
        config = self._settings | identity
        if role == "P":
            return EngineProcess(
                "prefill", POOL, bootstrap=self.heartbeats.address, seed=1, config=config, constants=CONSTANTS
            )
        return EngineProcess("decode", POOL, config=config, constants=CONSTANTS)

    def _other_identity(self, role: str) -> dict[str, Any]:
        number = next(self._names)
        name: dict[str, Any] = {"instance_id": f"{role}{number}"}
        return (
            name | {"side_channel_port": free_port(), "transfer_port": free_port()} if role == "P" else name
        )

    # What must be so after every storm.

    def held(self) -> dict[str, int]:
        """What the two sides still hold of requests that are over."""
        names = ("in_flight", "packed_bytes", "registered_bytes", "waiting_sends", "pulled_bytes")
        return {
            f"{role}.{name}": number
            for role in ("P", "D")
            for name, number in self.processes[role].stats().items()
            if name in names and number
        }
