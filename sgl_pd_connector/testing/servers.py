"""Child processes that serve HTTP: started, waited for, and stopped together. For tests, demos and benchmarks.

Each server leads a process group of its own, so that a Ctrl-C reaches only the program that started it, and that
program ends each group as a whole, whatever its server has spawned.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from sgl_pd_connector.errors import PDError

LOCALHOST = "127.0.0.1"
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.2
_FIRST_PORT = 20_000


class ServerError(PDError):
    """A server ended, or did not become ready in time. The message ends with the last lines of its log."""


def free_ports(count: int) -> list[int]:
    """Distinct ports that were free a moment ago, and that the kernel gives to nobody who asks for just any port."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with ExitStack() as stack:
        candidates = iter(random.sample(range(_FIRST_PORT, max(first_ephemeral, _FIRST_PORT + 1000)), 1000))
        ports: list[int] = []
        while len(ports) < count:
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind((LOCALHOST, port := next(candidates)))
                ports.append(port)
        return ports


@dataclass
class Server:
    """One process that serves ``http://127.0.0.1:port``.

    Attributes:
        name: for messages, and the name of its log.
        command: what to run.
        port: where it will serve.
        log: file that gets its output.
        environment: set on top of this process's own.
        health: path that answers 200 once it serves.
    """

    name: str
    command: Sequence[str]
    port: int
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @property
    def url(self) -> str:
        return f"http://{LOCALHOST}:{self.port}"

    @property
    def group(self) -> int:
        """The process group of the server and everything it has spawned."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        return self

    def is_ready(self) -> bool:
        """Whether it serves now.

        Raises:
            ServerError: it has ended.
        """
        if not self.running:
            status = self._process.returncode if self._process else "not started"
            raise ServerError(f"{self.name} ended (status {status}); {self.log}:\n{self.tail()}")
        try:
            return httpx.get(self.url + self.health, timeout=2.0, verify=False).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the server and everything it has spawned."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """Ends the whole group: politely, then not. Harmless when it is not running."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        # What the server spawned may outlive it.
        self.signal(signal.SIGKILL)
        self._process.wait()

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        with self.log.open(errors="replace") as log:
            return "".join(deque(log, lines)).rstrip()


class Fleet:
    """Servers that live as long as a ``with`` block, stopped in the opposite order of their start."""

    def __init__(self) -> None:
        self._servers: list[Server] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, *servers: Server) -> None:
        for server in servers:
            self._servers.append(server)
            server.start()

    def stop(self, *servers: Server) -> None:
        """Stops some servers, by default all."""
        ending = servers or tuple(self._servers)
        for server in ending:
            server.signal(signal.SIGTERM)
        for server in reversed(ending):
            server.stop()
            self._servers.remove(server)

    def wait_ready(
        self,
        servers: Iterable[Server],
        timeout: float,
        on_ready: Callable[[Server], None] = lambda _: None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until all of them serve.

        Args:
            servers: those to wait for.
            timeout: in seconds.
            on_ready: called with each server as it becomes ready.
            on_poll: called now and then; may raise to give up.

        Raises:
            ServerError: a server of the fleet ended, or one of ``servers`` was not ready after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        waiting = list(servers)
        while waiting:
            for server in list(waiting):
                if server.is_ready():
                    waiting.remove(server)
                    on_ready(server)
            if waiting and time.monotonic() > deadline:
                late = waiting[0]
                raise ServerError(f"{late.name} is not ready after {timeout:g} s; {late.log}:\n{late.tail()}")
            if waiting:
                on_poll()
                time.sleep(_POLL_SECONDS)


def mini_lb(prefill: Server, bootstrap_port: int, decode: Server, *, port: int, log: Path) -> Server:
    """sglang's Python router, unmodified, in front of one prefill and one decode server."""
    command = [sys.executable, "-m", "sglang_router.launch_router", "--mini-lb", "--pd-disaggregation"]
    command += ["--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url]
    command += ["--host", LOCALHOST, "--port", str(port)]
    return Server("mini_lb", command, port, log)


def rust_router(
    prefill: Server,
    bootstrap_port: int,
    decode: Server,
    *,
    port: int,
    metrics_port: int,
    log: Path,
    options: Sequence[str] = (),
) -> Server:
    """sglang's Rust router, unmodified, in front of one prefill and one decode server; with further ``options``."""
    command = [
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--pd-disaggregation",
        "--policy",
        "round_robin",
    ]
    command += ["--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url]
    command += ["--host", LOCALHOST, "--port", str(port), "--prometheus-port", str(metrics_port), *options]
    return Server("Rust router", command, port, log, health="/readiness")


def sequential_proxy(prefill: Server, decode: Server, *, port: int, log: Path) -> Server:
    """A proxy that asks P first and hands P's ``kv_transfer_params`` to D, as vLLM's example proxies do."""
    command = [sys.executable, "-m", "sgl_pd_connector.testing.sequential_proxy"]
    command += ["--prefill", prefill.url, "--decode", decode.url, "--port", str(port)]
    return Server("sequential proxy", command, port, log)
