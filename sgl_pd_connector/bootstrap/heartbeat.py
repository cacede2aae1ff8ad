"""Keeps an instance registered: when to register, when to say "still there", what to make of the answers."""

from __future__ import annotations

import enum
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from sgl_pd_connector.bootstrap.client import BootstrapClient, BootstrapUnavailableError
from sgl_pd_connector.errors import BootstrapError
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.routes import (
    MAX_RANKS_PER_HEARTBEAT,
    Heartbeat,
    HeartbeatReply,
    Registered,
    Route,
)

logger = logging.getLogger(__name__)

_FIRST_RETRY = 0.5
# However short the ttl that a server claims: nothing it says may keep this process busy.
_SHORTEST_PERIOD = 0.1
_CALL_TIMEOUT = 2.0


class RegistrationStatus(enum.Enum):
    """How an instance stands with its bootstrap server, as far as it knows."""

    PENDING = "not registered yet, or forgotten by the server"
    REGISTERED = "registered"
    UNREACHABLE = "the server does not answer"
    REFUSED = "the server answers, but does not take the registration"
    SUPERSEDED = "another process has registered under the same instance_id"


class Registration:
    """What to tell the bootstrap server next, and when. Free of I/O: ask `next_call`, report what came of it.

    ``now`` is monotonic seconds; each ``on_...`` returns the seconds to wait before the next call.

    A server that has forgotten a rank (restarted, or the network was gone for longer than the ttl) is sent
    it again at once. A rank that another epoch holds is left to it: two processes with the same instance id
    would otherwise throw each other out for ever. Heartbeats go on, and when the other falls silent the
    rank is registered again.

    Args:
        routes: the ranks of one instance that live in this process: same role, instance_id and epoch.
        interval: seconds between heartbeats; a third of the server's ttl if that is less, but not below 0.1.
        jitter: random numbers 0 <= x < 1, which keep instances from calling in step.
    """

    def __init__(
        self, routes: Sequence[Route], *, interval: float, jitter: Callable[[], float] = random.random
    ) -> None:
        if not 1 <= len({route.key for route in routes}) == len(routes) <= MAX_RANKS_PER_HEARTBEAT:
            raise ValueError(f"1 to {MAX_RANKS_PER_HEARTBEAT} routes with different ranks, not {len(routes)}")
        if len({(route.role, route.instance_id, route.epoch) for route in routes}) != 1:
            raise ValueError("routes of one registration share role, instance_id and epoch")
        self._routes = {route.rank: route for route in routes}
        self._missing = dict(self._routes)
        self._interval = interval
        self._period = interval
        self._renew_at = 0.0  # when the ranks already put need a heartbeat, should others still be missing
        self._jitter = jitter
        self._retry = _FIRST_RETRY
        self.status = RegistrationStatus.PENDING

    def next_call(self, now: float) -> Route | Heartbeat:
        """A route to be put, or the heartbeat of those that were."""
        held_due = len(self._missing) < len(self._routes) and now >= self._renew_at
        if self._missing and not held_due:
            return next(iter(self._missing.values()))
        first = next(iter(self._routes.values()))
        held = [rank for rank in self._routes if rank not in self._missing]
        return Heartbeat(role=first.role, instance_id=first.instance_id, epoch=first.epoch, ranks=held)

    def on_registered(self, route: Route, reply: Registered, now: float) -> float:
        self._answered(reply.ttl)
        if len(self._missing) == len(self._routes):
            self._renew_at = now + self._period
        del self._missing[route.rank]
        self.status = RegistrationStatus.PENDING if self._missing else RegistrationStatus.REGISTERED
        return self._pause()

    def on_heartbeat(self, reply: HeartbeatReply, now: float) -> float:
        self._answered(reply.ttl)
        self._renew_at = now + self._period
        # A rank that is not ours can only be the server's mistake.
        unknown = {rank: self._routes[rank] for rank in reply.unknown if rank in self._routes}
        if unknown:
            self._missing |= unknown
            self.status = RegistrationStatus.PENDING
        elif not self._missing:
            lost = bool(reply.superseded)
            self.status = RegistrationStatus.SUPERSEDED if lost else RegistrationStatus.REGISTERED
        return self._pause()

    def on_failure(self, *, answered: bool) -> float:
        """The call failed; ``answered``: with a refusal, which a quick retry will not change."""
        self.status = RegistrationStatus.REFUSED if answered else RegistrationStatus.UNREACHABLE
        if answered:
            return self._spread(self._period)
        pause = min(self._period, self._retry)
        self._retry = 2 * pause
        return self._spread(pause)

    def _answered(self, ttl: float) -> None:
        self._retry = _FIRST_RETRY
        self._period = min(self._interval, max(_SHORTEST_PERIOD, ttl / 3))

    def _pause(self) -> float:
        return 0.0 if self._missing else self._spread(self._period)

    def _spread(self, seconds: float) -> float:
        return seconds * (0.9 + 0.2 * self._jitter())


class Registrar:
    """A daemon thread, owned by this object, that keeps the ranks of one instance registered from `start`
    to `close`.

    It never raises: whatever happens, the server is tried again for ever. Each change of status is logged once, and so
    is each kind of error that nobody thought of.

    Args:
        address: of the bootstrap server.
        routes: as for `Registration`.
        interval: seconds between heartbeats.
        auth_token: the shared secret, if the server wants one.
    """

    def __init__(
        self,
        address: Address,
        routes: Sequence[Route],
        *,
        interval: float = 5.0,
        auth_token: str | None = None,
    ) -> None:
        self._registration = Registration(routes, interval=interval)
        self._routes = tuple(routes)
        self._interval = interval
        self._unexpected: set[type[Exception]] = set()
        self._client = BootstrapClient(address, timeout=_CALL_TIMEOUT, auth_token=auth_token)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sgl-pd-registrar", daemon=True)

    @property
    def status(self) -> RegistrationStatus:
        return self._registration.status

    @property
    def registered(self) -> bool:
        return self.status is RegistrationStatus.REGISTERED

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begins what `close` ends, without waiting: the thread deregisters."""
        self._closing.set()

    def close(self) -> None:
        """Deregisters, within seconds even if the server hangs, and ends the thread. Harmless when
        repeated."""
        self.stop()
        if self._thread.ident is not None:
            # A call under way and the goodbye. A thread that is later than that ends by itself.
            self._thread.join(2 * _CALL_TIMEOUT)

    def _run(self) -> None:
        delay = 0.0
        with self._client:
            while not self._closing.wait(delay):
                before = self.status
                try:
                    delay, error = self._step()
                except Exception as unexpected:  # noqa: BLE001 - an unregistered instance gets no requests
                    self._log_unexpected(unexpected)
                    delay = self._interval
                    continue
                if self.status is not before:
                    self._log(error)
            if self.status is not RegistrationStatus.UNREACHABLE:
                self._say_goodbye()

    def _step(self) -> tuple[float, Exception | None]:
        """One call; returns the seconds until the next, and what went wrong."""
        registration = self._registration
        call = registration.next_call(time.monotonic())
        try:
            if isinstance(call, Route):
                return registration.on_registered(call, self._client.put(call), time.monotonic()), None
            return registration.on_heartbeat(self._client.heartbeat(call), time.monotonic()), None
        except BootstrapError as error:
            answered = not isinstance(error, BootstrapUnavailableError)
            return registration.on_failure(answered=answered), error

    def _log(self, error: Exception | None) -> None:
        first = self._routes[0]
        level = logging.INFO if error is None and self.registered else logging.WARNING
        logger.log(
            level,
            "%s instance %s at bootstrap server %s: %s%s",
            first.role,
            first.instance_id,
            self._client.address,
            self.status.value,
            f": {error}" if error is not None else "",
        )

    def _log_unexpected(self, error: Exception) -> None:
        if type(error) in self._unexpected:
            return
        self._unexpected.add(type(error))
        logger.error(
            "%s instance %s: unexpected error at bootstrap server %s; going on every %g s (heartbeat_interval)",
            self._routes[0].role,
            self._routes[0].instance_id,
            self._client.address,
            self._interval,
            exc_info=error,
        )

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + _CALL_TIMEOUT
        try:
            for route in self._routes:
                if time.monotonic() > deadline:
                    break
                self._client.delete(route.key, route.epoch)
        except Exception as error:  # noqa: BLE001 - it makes no difference any more
            logger.info("not deregistered, the registration expires by itself: %s", error)
