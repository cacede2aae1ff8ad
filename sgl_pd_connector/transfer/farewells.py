"""Requests that are over on D, and of which P is still to be told. Part of `InterestTable`, and without I/O like it.

What ends a request may be lost like any other message; P would then keep its copy for a whole lease and count a failure
where D has everything. So DONE, FAILED and ABORT are repeated until P answers that it has no such request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import TransferAbortedError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.interest import RESUBSCRIBE, Action, Interest, PeerRoute, Send
from sgl_pd_connector.wire import messages as msg


@dataclass
class _Leaving:
    """One request.

    Attributes:
        since: when it was over, or when P was first told.
        told: what P was told; None while it is asked whether it knows the request.
    """

    interest: Interest
    since: float
    told: msg.Message | None = None


class Farewells:
    """Not thread-safe: that of its table drives it."""

    def __init__(
        self,
        *,
        ask: Callable[[Interest, float], list[Action]],
        bootstrap_timeout: float,
        peer_timeout: float,
    ) -> None:
        """
        Args:
            ask: looks for prefill instances and asks them for the request, as often as is due.
            bootstrap_timeout: seconds for which a P that does not know the request is waited for.
            peer_timeout: seconds after which a P that does not answer is left alone.
        """
        self._ask = ask
        self._bootstrap_timeout = bootstrap_timeout
        self._peer_timeout = peer_timeout
        self._leaving: dict[int, _Leaving] = {}

    def get(self, attempt: int) -> Interest | None:
        leaving = self._leaving.get(attempt)
        return None if leaving is None else leaving.interest

    def asks_for(self, interest: Interest) -> bool:
        """Whether a P that knows it is still looked for."""
        leaving = self._leaving.get(interest.attempt)
        return leaving is not None and leaving.told is None

    def add(self, interest: Interest, now: float) -> list[Action]:
        """Its life has ended."""
        leaving = self._leaving[interest.attempt] = _Leaving(interest, now)
        if isinstance(interest.life.error, TransferAbortedError) and not interest.met:
            # An ABORT now would mean nothing to P, which would prefill and keep a copy for nobody. So the room is
            # asked for until P knows it, and then given up.
            return []
        return self._tell(leaving, now)

    def on_message(
        self, interest: Interest, route: PeerRoute, message: msg.Message, now: float
    ) -> list[Action]:
        """What one of `Interest.asked` says of it."""
        leaving = self._leaving[interest.attempt]
        knows = ("yes", "other_prompt") if interest.whole_room else ("yes",)
        known = isinstance(message, msg.Ready) or (isinstance(message, msg.Wait) and message.known in knows)
        if leaving.told is None and known:
            return self._tell(leaving, now)
        if leaving.told is None and isinstance(message, msg.Wait):
            return []  # it may come to know it
        if not known:
            del interest.asked[route]
            self._drop_if_settled(interest)
        return []

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for leaving in list(self._leaving.values()):
            interest, age = leaving.interest, now - leaving.since
            if leaving.told is None:
                late = age > self._bootstrap_timeout
                actions += self._tell(leaving, now) if late else self._ask(interest, now)
            elif age > self._peer_timeout:
                del self._leaving[interest.attempt]
            elif now >= interest.next_subscribe:
                interest.next_subscribe = now + RESUBSCRIBE
                actions += [Send(route, leaving.told) for route in interest.asked]
        return actions

    def close(self, now: float) -> list[Action]:
        """This instance stops: says what has not been said."""
        actions: list[Action] = []
        for leaving in list(self._leaving.values()):
            if leaving.told is None:
                actions += self._tell(leaving, now)
        self._leaving.clear()
        return actions

    def _tell(self, leaving: _Leaving, now: float) -> list[Action]:
        interest = leaving.interest
        leaving.told, leaving.since = _farewell(interest), now
        interest.next_subscribe = now + RESUBSCRIBE
        self._drop_if_settled(interest)
        return [Send(route, leaving.told) for route in interest.asked]

    def _drop_if_settled(self, interest: Interest) -> None:
        if not interest.asked:
            del self._leaving[interest.attempt]


def _farewell(interest: Interest) -> msg.Message:
    room, attempt, life = interest.key.room, interest.attempt, interest.life
    if life.state is KVPoll.Success:
        return msg.Done(room=room, attempt=attempt)
    error = life.failure_exception()
    reason = reasons.for_peer(room, error)
    if isinstance(error, TransferAbortedError):
        return msg.Abort(room=room, attempt=attempt, reason=reason, whole_room=interest.whole_room)
    return msg.Failed(room=room, attempt=attempt, reason=reason)
