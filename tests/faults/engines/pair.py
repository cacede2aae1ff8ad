"""A real P and D, the bootstrap server and both of sglang's routers: each a process that can be killed or stopped."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from sgl_pd_connector.testing.checkpoints import make_checkpoint
from sgl_pd_connector.testing.engines import FailurePolicy, Role
from sgl_pd_connector.testing.reference import ReferenceModel
from sgl_pd_connector.testing.servers import LOCALHOST, Fleet, Server, free_ports, mini_lb, rust_router
from tests.faults.bootstrap_view import BootstrapView
from tests.faults.engines.adapters import ADAPTERS
from tests.faults.network import Network
from tests.waiting import eventually

DEADLINES = {
    "peer_timeout": 2.5,
    "lease": 4.0,
    "bootstrap_timeout": 4.0,
    "prefill_timeout": 20.0,
    "transfer_timeout": 4.0,
}
SETTINGS: dict[str, Any] = DEADLINES | {"heartbeat_interval": 0.5, "heartbeat_ttl": 3.0}

LONGEST = DEADLINES["bootstrap_timeout"] + DEADLINES["prefill_timeout"] + DEADLINES["transfer_timeout"]
"""No transfer may take longer: the longest way is through all three."""

TWICE = 2 * max(
    DEADLINES[name] for name in ("peer_timeout", "lease", "bootstrap_timeout", "transfer_timeout")
)
"""Twice the deadline of whoever waits for somebody silent."""

ENGINES: dict[str, Role] = {"P": "prefill", "D": "decode"}
ROUTERS = ("mini_lb", "rust")
START_SECONDS = 400.0

# The router's own patience, shortened like everybody's: it keeps away from a server that has failed.
RUST_OPTIONS = ["--health-check-interval-secs", "1", "--health-success-threshold", "1"]
RUST_OPTIONS += ["--health-failure-threshold", "2", "--cb-timeout-duration-secs", "1"]


class Pair:
    """Entering it starts everything.

    Attributes:
        servers: the processes by their part: P, D, bootstrap, mini_lb, rust.
        policy: what the next D that is started does with a request whose KV does not arrive.
        view: the bootstrap server as D sees it; through it all of D's connections to P can be cut.
    """

    def __init__(self, name: str, directory: Path) -> None:
        """``name``: of the engine."""
        self.adapter = ADAPTERS[name]()
        self.policy: FailurePolicy = "recompute"
        self.servers: dict[str, Server] = {}
        self._directory = directory
        self._starts = 0
        self._settings = dict(SETTINGS)

    def __enter__(self) -> Self:
        self.model = str(make_checkpoint())
        self.reference = ReferenceModel(make_checkpoint())
        names = ("bootstrap", "P", "D", *ROUTERS)
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        bootstrap = f"{LOCALHOST}:{self._ports['bootstrap']}"
        self._settings["bootstrap_addr"] = bootstrap
        self._fleet = Fleet()
        self.network = Network()
        try:
            self.view = BootstrapView(self.network, bootstrap)
            self._start("bootstrap")
            self._start("P", "D")
            self._start(*ROUTERS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.stop()
        self.network.close()

    @property
    def bootstrap_port(self) -> int:
        """The one that requests carry."""
        return int(self.view.address.rpartition(":")[2])

    # What can be done to a process.

    def kill(self, name: str) -> None:
        self.servers[name].signal(signal.SIGKILL)
        self._fleet.stop(self.servers[name])

    def stop(self, name: str) -> None:
        self.servers[name].signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.servers[name].signal(signal.SIGCONT)

    def use_policy(self, policy: FailurePolicy) -> None:
        """Restarts D if it has another."""
        if self.policy != policy:
            self.policy = policy
            self.kill("D")
            self.start("D")

    def start(self, name: str, *, same_address: bool = True) -> None:
        """A successor of what was killed; it serves when this returns. The Rust router is told a new address."""
        before = self.servers[name].url
        if not same_address:
            (self._ports[name],) = free_ports(1)
        self._start(name)
        if not same_address and name in ENGINES:
            self._tell_rust(before, name)

    def _start(self, *names: str) -> None:
        servers = [self._make(name) for name in names]
        self.servers.update(zip(names, servers, strict=True))
        self._fleet.start(*servers)
        self._fleet.wait_ready(servers, START_SECONDS)

    def _make(self, name: str) -> Server:
        self._starts += 1
        directory = self._directory / f"{self._starts}-{name}"
        directory.mkdir()
        port, log = self._ports[name], directory / "log"
        if name in ENGINES:
            role = ENGINES[name]
            engine = self.adapter.engine(role, self.policy)
            settings = self._settings | {"instance_id": f"{name}-{port}"}
            return engine.server(role, port=port, directory=directory, settings=settings)
        if name == "bootstrap":
            command = [sys.executable, "-m", "sgl_pd_connector.cli.main", "bootstrap", "--port", str(port)]
            command += ["--ttl", str(SETTINGS["heartbeat_ttl"])]
            return Server(name, command, port, log)
        pair = (self.servers["P"], self.bootstrap_port, self.servers["D"])
        if name == "mini_lb":
            return mini_lb(*pair, port=port, log=log)
        (metrics_port,) = free_ports(1)
        return rust_router(*pair, port=port, metrics_port=metrics_port, log=log, options=RUST_OPTIONS)

    def _tell_rust(self, old_url: str, name: str) -> None:
        """The Rust router's list of servers can be changed while it runs. mini_lb's cannot."""
        workers = self.servers["rust"].url + "/workers"
        body: dict[str, Any] = {"url": self.servers[name].url, "worker_type": ENGINES[name]}
        if name == "P":
            body["bootstrap_port"] = self.bootstrap_port
        httpx.post(workers, json=body, timeout=30.0).raise_for_status()

        def listed() -> dict[str, dict[str, Any]]:
            return {worker["url"]: worker for worker in httpx.get(workers).json()["workers"]}

        eventually(lambda: body["url"] in listed(), f"the Rust router lists {body['url']}")
        httpx.delete(f"{workers}/{listed()[old_url]['id']}", timeout=30.0).raise_for_status()
        eventually(lambda: old_url not in listed(), f"the Rust router forgets {old_url}")

    # How everything stands.

    def standing(self, name: str) -> Mapping[str, float]:
        """What P or D says of itself, as of its last step: see `wake`."""
        return self.adapter.standing(self.servers[name])

    def ended(self, name: str, outcome: str) -> float:
        """Transfers of P or D that have ended so since it was started."""
        self.wake(name)
        return self.adapter.ended(self.servers[name])[outcome]

    def held(self) -> dict[str, float]:
        """What P and D still hold of requests that are over."""
        return {
            f"{name}.{what}": value
            for name in ENGINES
            for what, value in self.standing(name).items()
            if value
        }

    def wake(self, *names: str) -> None:
        for name in names:
            self.adapter.wake(self.servers[name], self.model)
