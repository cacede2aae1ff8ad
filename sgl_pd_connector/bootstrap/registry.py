"""The registered routes and when each was last heard of. No I/O, no threads, the clock passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from sgl_pd_connector.errors import BootstrapError
from sgl_pd_connector.wire.routes import Heartbeat, Rank, Role, Route, RouteKey


class RegistryFullError(BootstrapError):
    """Too many routes are registered; the setting that bounds them is in the message."""


@dataclass(slots=True)
class _Entry:
    route: Route
    heard: float


class Registry:
    """Routes by key, each forgotten when not heard of for ``ttl`` seconds.

    One key belongs to one epoch at a time. The newest registration wins, since a restarted instance must
    not wait for its predecessor to expire; the predecessor's heartbeats then no longer count, so it cannot
    come back unasked.

    Every operation first drops what has expired. That costs O(expired): all entries share one ttl, so those
    that were silent longest come first in ``_entries``. The rest is O(1), but for `routes`, which is
    O(listed).

    Not thread-safe: it belongs to the server's event loop.

    Args:
        ttl: seconds a route is kept after it was last heard of.
        max_routes: bound on the number of routes.
        clock: monotonic seconds.
        on_expired: told of the routes that were just dropped because their instances fell silent.
    """

    def __init__(
        self,
        *,
        ttl: float,
        max_routes: int,
        clock: Callable[[], float],
        on_expired: Callable[[Sequence[Route]], None] = lambda _routes: None,
    ) -> None:
        self.ttl = ttl
        self.max_routes = max_routes
        self._clock = clock
        self._on_expired = on_expired
        self._entries: OrderedDict[RouteKey, _Entry] = OrderedDict()
        self._by_role: dict[Role, dict[RouteKey, Route]] = {role: {} for role in get_args(Role)}

    def put(self, route: Route) -> bool:
        """Registers or replaces; returns whether the key was known.

        Raises:
            RegistryFullError: the key is new and there are ``max_routes`` already.
        """
        now = self._sweep()
        known = route.key in self._entries
        if not known and len(self._entries) >= self.max_routes:
            raise RegistryFullError(
                f"{self.max_routes} routes are registered, which is the most (max_routes)"
            )
        self._entries[route.key] = _Entry(route, now)
        self._entries.move_to_end(route.key)
        self._by_role[route.role][route.key] = route
        return known

    def delete(self, key: RouteKey, epoch: int | None = None) -> bool:
        """Forgets a route, or with ``epoch`` only if that epoch holds it; returns whether it did."""
        self._sweep()
        entry = self._entries.get(key)
        if entry is None or (epoch is not None and entry.route.epoch != epoch):
            return False
        self._drop(key)
        return True

    def heartbeat(self, beat: Heartbeat) -> tuple[list[Rank], list[Rank]]:
        """Renews the ranks of one instance; returns those unknown and those held by another epoch."""
        now = self._sweep()
        unknown: list[Rank] = []
        superseded: list[Rank] = []
        for rank in beat.ranks:
            key = RouteKey(beat.role, beat.instance_id, rank)
            entry = self._entries.get(key)
            if entry is None:
                unknown.append(rank)
            elif entry.route.epoch != beat.epoch:
                superseded.append(rank)
            else:
                entry.heard = now
                self._entries.move_to_end(key)
        return unknown, superseded

    def get(self, key: RouteKey) -> Route | None:
        self._sweep()
        entry = self._entries.get(key)
        return entry.route if entry is not None else None

    def routes(self, role: Role) -> Iterable[Route]:
        """All routes of a role, in the order of their first registration. Valid until the next change."""
        self._sweep()
        return self._by_role[role].values()

    def count(self, role: Role) -> int:
        self._sweep()
        return len(self._by_role[role])

    def _sweep(self) -> float:
        """Drops what has expired; returns the time it took for that."""
        now = self._clock()
        expired: list[Route] = []
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now - entry.heard < self.ttl:
                break
            self._drop(key)
            expired.append(entry.route)
        if expired:
            self._on_expired(expired)
        return now

    def _drop(self, key: RouteKey) -> None:
        del self._entries[key]
        del self._by_role[key.role][key]
