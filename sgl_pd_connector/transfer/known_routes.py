"""What bootstrap servers have said, for as long as it is of use. Without I/O: the time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sgl_pd_connector.transfer.interest import PeerRoute

FRESH = 1.0
"""Seconds for which an answer is good enough for the next request: bursts ask the bootstrap server once."""

MAX_SERVERS = 1000
"""Bootstrap servers remembered. Requests name them."""


@dataclass
class _Server:
    """``routes``: since when each is not listed any more; None: it is."""

    answered: float
    routes: dict[PeerRoute, float | None] = field(default_factory=dict)


class KnownRoutes:
    """Prefill instances by the bootstrap address where they were registered. Not thread-safe: one thread's.

    A bootstrap server that is down, or was just restarted and knows nobody yet, must not keep requests from prefill
    instances that are known and live. So what a server has said outlives it, until one that answers has not listed an
    instance for a while, or lists its successor, or until the instance itself turns out to be gone (`forget`).
    """

    def __init__(self, patience: float) -> None:
        """
        Args:
            patience: seconds for which an instance may be missing from the answers: those in which it notices that it
                has to register again.
        """
        self._patience = patience
        self._servers: dict[str, _Server] = {}

    def get(self, server: str) -> Sequence[PeerRoute]:
        known = self._servers.get(server)
        return [] if known is None else list(known.routes)

    def is_fresh(self, server: str, now: float) -> bool:
        """Whether asking again can wait. Not while a request finds nobody."""
        known = self._servers.get(server)
        return known is not None and bool(known.routes) and now - known.answered < FRESH

    def learn(self, server: str, listed: Sequence[PeerRoute], now: float) -> None:
        """The server has answered."""
        before = self._servers.pop(server, None)
        routes: dict[PeerRoute, float | None] = dict.fromkeys(listed)
        names = {route.peer.instance_id for route in listed}
        for route, missing in before.routes.items() if before is not None else ():
            since = now if missing is None else missing
            if route.peer.instance_id not in names and now - since < self._patience:
                routes[route] = since
        # The one that answered last stands last.
        self._servers[server] = _Server(now, routes)
        if len(self._servers) > MAX_SERVERS:
            del self._servers[next(iter(self._servers))]

    def forget(self, route: PeerRoute) -> None:
        """The instance was asked and is gone, or another runs in its place."""
        for server in self._servers.values():
            server.routes.pop(route, None)
