"""The bootstrap server: where prefill and decode instances find each other, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sgl_pd_connector.base import BaseKVBootstrapServer
from sgl_pd_connector.bootstrap.app import make_app
from sgl_pd_connector.bootstrap.registry import Registry
from sgl_pd_connector.errors import BootstrapError, ConfigError
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.routes import Route

logger = logging.getLogger(__name__)

_HOST_SETTING = "host (--host)"
_PORT_SETTING = "bootstrap_port (--port)"
_START_TIMEOUT = 10.0
_DRAIN_TIMEOUT = 1
_BACKLOG = 512
_NAMED_IN_LOG = 5

PATIENCE = 30.0
"""Seconds a client has for each request, from its first byte to having read the answer."""

MAX_CONNECTIONS = 512
"""More are closed at once: inside a prefill server their descriptors are missed elsewhere."""


class HTTPBootstrapServer(BaseKVBootstrapServer):
    """FastAPI on uvicorn, in a daemon thread that this object owns; no signal handler is touched.

    The thread's event loop alone touches the registry, so there is no lock. Nothing is stored: a restarted
    server is refilled by the next heartbeats.

    Args:
        host: address to bind; a name is resolved. ``::`` serves IPv4 too.
        port: port to bind; 0 takes a free one, see `address`.
        ttl: seconds a registration is kept after it was last heard of.
        max_routes: bound on the number of registrations.
        auth_token: shared secret that every request but ``GET /health`` must carry; None for no secret.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8998,
        *,
        ttl: float = 15.0,
        max_routes: int = 32_768,
        auth_token: str | None = None,
    ) -> None:
        self._bind_to = Address.of(host, port, setting=_HOST_SETTING)
        self._ttl = ttl
        self._max_routes = max_routes
        self._auth_token = auth_token
        self._address: Address | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> Address:
        """Where it is bound, with the real port. Raises `BootstrapError` before `start`."""
        if self._address is None:
            raise BootstrapError("the bootstrap server has not been started")
        return self._address

    def start(self) -> None:
        """Binds and serves; returns when requests are answered.

        Raises:
            ConfigError: host or port cannot be bound; the message names the setting.
            BootstrapError: already started, or the server did not come up.
        """
        if self._thread is not None:
            raise BootstrapError(f"the bootstrap server is already started on {self._address}")
        # Bound here and not in the thread, so that a port in use is an error of the caller.
        numeric = self._bind_to.resolved(setting=_HOST_SETTING)
        listener = _bind(numeric)
        self._address = Address(numeric.host, listener.getsockname()[1])
        registry = Registry(
            ttl=self._ttl, max_routes=self._max_routes, clock=time.monotonic, on_expired=_ExpiryLog()
        )
        config = uvicorn.Config(
            make_app(registry, self._auth_token),
            http=_Connection,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_DRAIN_TIMEOUT,
        )
        self._server = server = _Server(config)
        self._thread = threading.Thread(
            target=server.serve_on, args=(listener,), name="sgl-pd-bootstrap", daemon=True
        )
        self._thread.start()
        if not server.decided.wait(_START_TIMEOUT) or not server.started:
            self.stop()
            raise BootstrapError(f"the bootstrap server on {self._bind_to} did not come up: {server.failure}")
        logger.info("bootstrap server on %s, registrations live %g s", self._address.url(), self._ttl)

    def stop(self) -> None:
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join()
        self._server = self._thread = None

    def poll(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


class _Connection(H11Protocol):
    """uvicorn's connection, cut off when there are too many or when its client lets it wait."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._wait_for_next()

    def on_response_complete(self) -> None:
        self._wait_for_next()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _wait_for_next(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        # Not close(): that would wait for a client that does not read.
        self._deadline = self.loop.call_later(PATIENCE, self.transport.abort)


class _Server(uvicorn.Server):
    """uvicorn's server with news for the thread that started it, and no connection left behind."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.decided = threading.Event()
        self.failure: Exception | None = None

    def serve_on(self, listener: socket.socket) -> None:
        """Body of the server's thread."""
        try:
            self.run(sockets=[listener])
        except Exception as error:  # the thread's last line: whatever ends it is reported, not lost
            self.failure = error
            logger.exception("the bootstrap server ended")
        finally:
            listener.close()
            self.decided.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.decided.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets=sockets)
        # Clients that do not read their answers are still there.
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _bind(numeric: Address) -> socket.socket:
    """A listening socket. Raises `ConfigError` naming the setting."""
    with contextlib.ExitStack() as on_error:
        # asyncio turns Nagle's algorithm off only where the protocol is named; with it each answer takes 40
        # ms.
        listener = on_error.enter_context(
            socket.socket(numeric.family or socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        )
        # Connections of a predecessor that still linger must not keep the port; another listener must.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if numeric.family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not numeric.is_wildcard)
        try:
            listener.bind((numeric.host, numeric.port))
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(_why_not_bound(numeric, error)) from None
        on_error.pop_all()
        return listener


def _why_not_bound(address: Address, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"bootstrap server: {address} is in use by another process: choose another {_PORT_SETTING}"
    if error.errno == errno.EACCES:
        return f"bootstrap server: not allowed to bind {address}: choose a {_PORT_SETTING} above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"bootstrap server: {address.host} is not an address of this machine: change {_HOST_SETTING}"
    return f"bootstrap server: cannot bind {address}: {error.strerror}: {_HOST_SETTING}, {_PORT_SETTING}"


class _ExpiryLog:
    """One line for all that fall silent within a second: a rack that goes down is thousands of routes."""

    def __init__(self) -> None:
        self._ranks: Counter[str] = Counter()

    def __call__(self, routes: Sequence[Route]) -> None:
        if not self._ranks:
            asyncio.get_running_loop().call_later(1.0, self._write)
        self._ranks.update(f"{route.role} instance {route.instance_id}" for route in routes)

    def _write(self) -> None:
        named = ", ".join(f"{name} ({ranks} ranks)" for name, ranks in self._ranks.most_common(_NAMED_IN_LOG))
        more = len(self._ranks) - _NAMED_IN_LOG
        logger.warning(
            "fell silent and no longer listed: %s%s", named, f" and {more} more instances" if more > 0 else ""
        )
        self._ranks.clear()
