"""D's half of the side channel, without I/O: which rooms are wanted, from whom, and what has been heard.

`InterestTable` takes messages, look-up results, commands and the time, and returns what to do. One thread drives it
(`decode_channel`).

A bootstrap address may be shared by several prefill instances, and the router says only the address. So D asks all of
them for the room; the one that answers READY is taken and the others are told to forget it. One that refuses or stops
is crossed out, and ends the request only if it is the one that has it, or the last. While nobody has it, the look-up is
repeated: a prefill instance may have been restarted, or be new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import BootstrapError, PDError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.farewells import Farewells
from sgl_pd_connector.transfer.interest import (
    RESUBSCRIBE,
    Action,
    Asked,
    Interest,
    LookUp,
    Lost,
    PeerRoute,
    Send,
)
from sgl_pd_connector.wire import messages as msg

LOOKUP_RETRY = 0.5
"""Seconds between look-ups while there is no prefill instance to ask."""

PAUSE = 2.0
"""Seconds between two ticks that mean that this process did not run: stopped, or its machine paused."""

LOOKUP_REPEAT = 2.0
"""Seconds between look-ups while none of those asked has the request."""


class Timeouts(NamedTuple):
    """Seconds; the fields are settings of the same name."""

    bootstrap_timeout: float
    peer_timeout: float
    prefill_timeout: float
    transfer_timeout: float


class InterestTable:
    """All interests of a decode instance. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        *,
        timeouts: Timeouts,
        instance_id: str,
        layout_digest: str,
        check: Callable[[Interest, msg.Ready], None],
        ended: Callable[[Interest], None],
    ) -> None:
        """
        Args:
            timeouts: deadlines of the states.
            instance_id: how this D introduces itself.
            layout_digest: of this D's KV layout.
            check: raises `PDError` for a READY that does not fit the interest or this D.
            ended: told of every interest that is over, once.
        """
        self._timeouts = timeouts
        self._instance_id = instance_id
        self._layout_digest = layout_digest
        self._check = check
        self._ended = ended
        self._by_attempt: dict[int, Interest] = {}
        self._ticked = math.inf
        # Over for the engine. Not part of the above, which is what the engine waits for.
        self._farewells = Farewells(
            ask=self._ask, bootstrap_timeout=timeouts.bootstrap_timeout, peer_timeout=timeouts.peer_timeout
        )

    def __len__(self) -> int:
        return len(self._by_attempt)

    # Commands.

    def add(self, interest: Interest, now: float) -> list[Action]:
        """A request that wants a room."""
        self._by_attempt[interest.attempt] = interest
        return self._look_up(interest, now)

    def refused(self, interest: Interest, now: float) -> list[Action]:
        """An HTTP request that this server refused (`Interest.whole_room`): P is told as soon as it knows the room."""
        return self._farewells.add(interest, now)

    def offer_again(self, interest: Interest, now: float) -> list[Action]:
        """A pull failed, and with it what P had offered: asks for another offer, which will be `Interest.ready`."""
        if interest.attempt not in self._by_attempt or interest.source is None:
            return []
        interest.again += 1
        interest.next_subscribe = now + RESUBSCRIBE
        return [Send(interest.source, self._subscribe(interest, interest.source))]

    def over(self, interest: Interest, now: float) -> list[Action]:
        """The life has ended, by whoever did it: tells P. Later calls do nothing."""
        if self._by_attempt.pop(interest.attempt, None) is None:
            return []
        self._ended(interest)
        return self._farewells.add(interest, now)

    # What comes back.

    def found(self, interest: Interest, routes: Sequence[PeerRoute], now: float) -> list[Action]:
        """The bootstrap server's answer: the prefill instances registered there that this D can use."""
        interest.lookup_pending = False
        interest.looked_up_at = now
        interest.lookup_error = None
        interest.looked_up = True
        return self.suggest(interest, routes, now)

    def suggest(self, interest: Interest, routes: Sequence[PeerRoute], now: float) -> list[Action]:
        """Prefill instances that were there when the bootstrap server was last asked. The look-up goes on."""
        wanted = interest.attempt in self._by_attempt or self._farewells.asks_for(interest)
        if not wanted or interest.ready is not None:
            return []
        new = [route for route in routes if route not in interest.asked and route not in interest.crossed_out]
        if new and interest.known_at is None:
            interest.known_at = now
        if not interest.asked:
            interest.next_subscribe = now + RESUBSCRIBE
        interest.asked |= {route: Asked(now) for route in new}
        return [Send(route, self._subscribe(interest, route)) for route in new]

    def not_found(self, interest: Interest, error: PDError, now: float) -> list[Action]:
        """The look-up failed. Wrong for good (`IncompatiblePeerError`) ends the interest, the rest is retried."""
        interest.lookup_pending = False
        interest.looked_up_at = now
        interest.lookup_error = error
        if isinstance(error, BootstrapError) or interest.asked:
            return []
        error = reasons.look_up_refused(interest.key.room, interest.bootstrap_addr, error)
        return self._fail(interest, error, now)

    def on_message(self, route: PeerRoute, message: msg.Message, now: float) -> list[Action]:
        """What a P says. Anything about attempts that are over, or from the wrong P, changes nothing."""
        interest = self._by_attempt.get(message.attempt) or self._farewells.get(message.attempt)
        if interest is None or route not in interest.asked or message.room != interest.key.room:
            return []
        interest.asked[route].heard = now
        if interest.attempt not in self._by_attempt:
            return self._farewells.on_message(interest, route, message, now)
        match message:
            case msg.Wait():
                return self._on_wait(interest, route, message, now)
            case msg.Ready():
                return self._on_ready(interest, route, message, now)
            case msg.Failed() | msg.Abort():
                return self._on_refusal(interest, route, message, now)
            case _:
                return []

    def _on_refusal(
        self, interest: Interest, route: PeerRoute, message: msg.Failed | msg.Abort, now: float
    ) -> list[Action]:
        said = reasons.peer_failed if isinstance(message, msg.Failed) else reasons.peer_gave_up
        asked = interest.asked.pop(route)
        interest.crossed_out.add(route)
        if asked.known != "yes" and interest.asked:
            return []
        return self._fail(interest, said(interest.key.room, str(route), message.reason), now)

    def _on_wait(self, interest: Interest, route: PeerRoute, wait: msg.Wait, now: float) -> list[Action]:
        had_it = interest.asked[route].known == "yes"
        actions: list[Action] = []
        if wait.known == "restarted":
            del interest.asked[route]
            interest.crossed_out.add(route)
            actions.append(Lost(route))
        else:
            interest.asked[route].known = wait.known
        if wait.known == "yes":
            interest.known_at = now
        elif had_it:
            actions += self._fail(interest, reasons.prefill_forgot(interest.key.room, str(route)), now)
        return actions

    def _on_ready(self, interest: Interest, route: PeerRoute, ready: msg.Ready, now: float) -> list[Action]:
        if ready.again != interest.again or (interest.ready and interest.ready.again == ready.again):
            return []
        try:
            self._check(interest, ready)
        except PDError as problem:
            return self._fail(interest, reasons.does_not_fit(ready.room, str(route), problem), now)
        if interest.ready is not None:
            interest.ready = ready
            return []
        others = [other for other in interest.asked if other != route]
        interest.asked = {route: Asked(now, "yes")}
        interest.source = route
        interest.ready = ready
        interest.num_tokens = ready.num_tokens
        forget = msg.Abort(room=ready.room, attempt=interest.attempt, reason="another instance has the room")
        interest.life.advance(KVPoll.WaitingForInput, now)
        return [Send(other, forget) for other in others]

    # Time.

    def tick(self, now: float) -> list[Action]:
        """Repeats SUBSCRIBE, repeats look-ups, ends what is overdue. O(interests); called a few times a second."""
        actions: list[Action] = []
        pause, self._ticked = now - self._ticked, now
        if pause > PAUSE:
            # A P that was not asked has not been silent.
            for interest in self._by_attempt.values():
                for asked in interest.asked.values():
                    # What came in meanwhile may have been read already.
                    asked.heard = min(now, asked.heard + pause)
        for interest in list(self._by_attempt.values()):
            if not interest.life.is_final:
                silence = now - max((asked.heard for asked in interest.relied_on.values()), default=now)
                error = self._overdue(interest, silence, now)
                if error is not None:
                    interest.life.fail(error, now)
                if silence > self._timeouts.peer_timeout:
                    actions += self._silent(interest, now)
            if interest.life.is_final:
                actions += self.over(interest, now)
            else:
                actions += self._ask(interest, now)
        return actions + self._farewells.tick(now)

    def _ask(self, interest: Interest, now: float) -> list[Action]:
        """Look-ups and SUBSCRIBE, as often as they are due."""
        actions: list[Action] = []
        if all(asked.known != "yes" for asked in interest.asked.values()):
            pause = LOOKUP_REPEAT if interest.asked else LOOKUP_RETRY
            if now - interest.looked_up_at >= pause:
                actions += self._look_up(interest, now)
        if now >= interest.next_subscribe:
            interest.next_subscribe = now + RESUBSCRIBE
            actions += [Send(route, self._subscribe(interest, route)) for route in interest.asked]
        return actions

    def _overdue(self, interest: Interest, silence: float, now: float) -> PDError | None:
        """``silence``: seconds since any P that it relies on has answered."""
        room, limits, age = interest.key.room, self._timeouts, interest.life.age(now)
        if silence > limits.peer_timeout:
            return reasons.prefill_silent(room, interest.who, silence, limits.peer_timeout)
        match interest.life.state:
            case KVPoll.Bootstrapping:
                return (
                    self._overdue_at_p(interest, now)
                    if interest.asked
                    else self._overdue_at_bootstrap(interest, age)
                )
            case KVPoll.WaitingForInput if age > limits.prefill_timeout:
                return reasons.no_pages(room, interest.who, age, limits.prefill_timeout)
            case KVPoll.Transferring if age > limits.transfer_timeout:
                late = reasons.not_pulled if interest.pulled_at is None else reasons.not_written
                return late(room, interest.who, age, limits.transfer_timeout)
        return None

    def _silent(self, interest: Interest, now: float) -> list[Action]:
        """Nobody is sent to a P that was asked and has not answered."""
        limit = self._timeouts.peer_timeout
        return [Lost(route) for route, asked in interest.asked.items() if now - asked.heard > limit]

    def _overdue_at_bootstrap(self, interest: Interest, age: float) -> PDError | None:
        limit = self._timeouts.bootstrap_timeout
        if age <= limit:
            return None
        cause: object
        if interest.lookup_error is not None:
            cause = interest.lookup_error
        elif interest.crossed_out:
            cause = "those registered there were restarted or have refused the request"
        elif interest.looked_up:
            cause = "none is registered there"
        else:
            cause = "it has not answered"
        return reasons.not_at_bootstrap(interest.key.room, interest.bootstrap_addr, cause, age, limit)

    def _overdue_at_p(self, interest: Interest, now: float) -> PDError | None:
        room, who, limits, age = (
            interest.key.room,
            interest.who,
            self._timeouts,
            interest.life.age(now),
        )
        if age > limits.prefill_timeout:
            return reasons.prefill_slow(room, who, age, limits.prefill_timeout)
        assert interest.known_at is not None
        unknown = now - interest.known_at
        if unknown > limits.bootstrap_timeout:
            other = any(asked.known == "other_prompt" for asked in interest.asked.values())
            return reasons.unknown_at_prefill(
                room, who, unknown, limits.bootstrap_timeout, other_prompt=other
            )
        return None

    def close(self, reason: str, now: float) -> list[Action]:
        """Ends everything: this instance stops."""
        actions: list[Action] = []
        for interest in list(self._by_attempt.values()):
            error = reasons.given_up(interest.key.room, interest.who, reason)
            actions += self._fail(interest, error, now)
        return actions + self._farewells.close(now)

    # Steps shared by the above.

    def _look_up(self, interest: Interest, now: float) -> list[Action]:
        if interest.lookup_pending:
            return []
        interest.lookup_pending = True
        interest.looked_up_at = now
        return [LookUp(interest)]

    def _subscribe(self, interest: Interest, route: PeerRoute) -> msg.Subscribe:
        return msg.Subscribe(
            room=interest.key.room,
            attempt=interest.attempt,
            prompt=interest.key.prompt,
            epoch=route.peer.epoch,
            instance_id=self._instance_id,
            layout_digest=self._layout_digest,
            again=interest.again,
        )

    def _fail(self, interest: Interest, error: PDError, now: float) -> list[Action]:
        interest.life.fail(error, now)
        return self.over(interest, now)
