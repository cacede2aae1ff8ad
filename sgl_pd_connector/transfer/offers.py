"""P's half of the side channel, without I/O: which rooms exist, who asked for them, what is offered.

`OfferTable` takes messages, commands and the time, and returns what to do. One thread drives it (`prefill_channel`).

An offer meets a decode instance when a SUBSCRIBE names its room and prompt. Only then are its buffers registered with
the transport, under fresh uuids: a request whose D never comes never touches the native server, and dropping it is
dropping a Python reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import PDError, TransferAbortedError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.recent_errors import RecentErrors
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.chunks import Chunk
from sgl_pd_connector.wire.rooms import RoomKey

MAX_SUBSCRIPTIONS = 65_536
"""Rooms that D may ask for ahead of P's own request. Beyond it D is told to wait and asks again."""


class PackedChunk(NamedTuple):
    """A chunk and its gathered buffers (arrays of the transport; opaque here)."""

    chunk: Chunk
    buffers: Sequence[Any]


@dataclass(eq=False)
class Offer:
    """One sender's side of a transfer.

    Attributes:
        sent_at: when the engine handed the prefilled prompt over; until `packed` it waits for room in
            ``max_packed_bytes``. Set once, on the engine's thread, and read by the one that drives the table: a number
            needs no lock.
        packed: the copy, once there was room for it; None before, and again when the offer is over.
        packed_bytes: its size, held in P's budget.
        attempt: D's attempt that claimed this offer, or None.
        peer: where to answer that D (opaque, but for its `str`, an address); `peer_name` is what to call it in texts.
        uuids: what `packed` is registered under, in order; empty while it is not.
        again: D's number for the latest offer: how often it has asked for another.
        retries: how often it was offered again.
        heard: when that D was last heard of.
    """

    key: RoomKey
    num_tokens: int
    life: Lifecycle
    sent_at: float | None = None
    packed: Sequence[PackedChunk] | None = None
    packed_bytes: int = 0
    attempt: int | None = None
    peer: Any = None
    peer_name: str = ""
    uuids: list[int] = field(default_factory=list)
    again: int = 0
    retries: int = 0
    heard: float = 0.0

    @property
    def sent(self) -> bool:
        return self.sent_at is not None


class Reply(NamedTuple):
    """Send a message to a D."""

    peer: Any
    message: msg.Message


class Register(NamedTuple):
    """Register each packed chunk of the offer under its uuid."""

    offer: Offer


class Release(NamedTuple):
    """Take back uuids, and give bytes back to the budget when the offer is over."""

    uuids: Sequence[int]
    packed_bytes: int


Action = Reply | Register | Release


@dataclass
class _Subscription:
    """A D that asked for a room before P's engine had the request."""

    peer: Any
    peer_name: str
    heard: float


class Timeouts(NamedTuple):
    """Seconds; the fields are settings of the same name."""

    lease: float
    prefill_timeout: float
    transfer_timeout: float


class OfferTable:
    """All offers of a prefill instance. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        *,
        timeouts: Timeouts,
        epoch: int,
        layout_digest: str,
        ready: Callable[[Offer, Sequence[int]], msg.Ready],
        new_uuid: Callable[[], int],
        ended: Callable[[Offer], None],
    ) -> None:
        """
        Args:
            timeouts: deadlines of the states.
            epoch: of this instance; a D that means another start of it is told.
            layout_digest: what a D must have too.
            ready: makes the READY for an offer from the uuids of its chunks.
            new_uuid: source of unguessable numbers.
            ended: told of every offer that is over, once.
        """
        self._timeouts = timeouts
        self._epoch = epoch
        self._layout_digest = layout_digest
        self._ready = ready
        self._new_uuid = new_uuid
        self._ended = ended
        self._by_key: dict[RoomKey, list[Offer]] = {}
        self._by_attempt: dict[int, Offer] = {}
        self._prompts_in_room: dict[int, int] = {}
        self._waiting: dict[RoomKey, dict[int, _Subscription]] = {}
        self._waiting_key: dict[int, RoomKey] = {}
        # Requests that failed before any D asked for them: one that asks later hears at once that it need not wait.
        self._ended_unasked: RecentErrors[RoomKey] = RecentErrors(timeouts.lease)
        # Rooms that D's server refused: of a body with several prompts some may come to P only after that.
        self._refused_rooms: RecentErrors[int] = RecentErrors(timeouts.lease)
        self.registered_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    # Commands of the engine.

    def add(self, offer: Offer, now: float) -> list[Action]:
        """A new request. A D that asked for it already is met at once; one of a room that D refused ends at once."""
        self._by_key.setdefault(offer.key, []).append(offer)
        self._prompts_in_room[offer.key.room] = self._prompts_in_room.get(offer.key.room, 0) + 1
        self._ended_unasked.discard(offer.key)
        waiting = self._waiting.get(offer.key)
        if not waiting:
            refused = self._refused_rooms.get(offer.key.room)
            return [] if refused is None else self._end(offer, refused, now)
        # The one heard last: a D that died is still here until its lease ends.
        attempt, subscription = max(waiting.items(), key=lambda item: item[1].heard)
        self._drop_subscription(attempt)
        return self._claim(offer, attempt, subscription.peer, subscription.peer_name, now)

    def packed(
        self, offer: Offer, packed: Sequence[PackedChunk], packed_bytes: int, now: float
    ) -> list[Action]:
        """The prompt is prefilled and copied out."""
        if offer.life.is_final:
            return [Release((), packed_bytes)]
        offer.packed, offer.packed_bytes = packed, packed_bytes
        return self._offer_now(offer, now)

    def abort(self, offer: Offer, reason: str, now: float) -> list[Action]:
        """The engine gave the request up."""
        return self._end(offer, reasons.given_up(offer.key.room, offer.peer_name, reason), now)

    def fail(self, offer: Offer, error: PDError, now: float) -> list[Action]:
        """Something on this side went wrong."""
        return self._end(offer, error, now)

    # What peers say.

    def on_message(self, peer: Any, message: msg.Message, now: float) -> list[Action]:
        """Messages that P does not expect, or about attempts that are over, change nothing."""
        match message:
            case msg.Subscribe():
                return self._on_subscribe(peer, message, now)
            case msg.Abort() if message.whole_room:
                return self._on_room_refused(peer, message, now)
            case msg.Done() | msg.Failed() | msg.Abort():
                # Repeated until it is answered that there is nothing more.
                actions = self._on_farewell(message, now)
                known: Literal["yes", "no"] = "no" if self._claimed_by(message) is None else "yes"
                return [*actions, _wait(peer, message, known)]
            case _:
                return []

    def _on_farewell(self, message: msg.Done | msg.Failed | msg.Abort, now: float) -> list[Action]:
        offer = self._claimed_by(message)
        match message:
            case _ if offer is None:
                self._drop_subscription(message.attempt)
                return []
            case msg.Done() if not offer.uuids:
                return []  # nothing was offered yet
            case msg.Done():
                offer.life.advance(KVPoll.Success, now)
                return self._forget(offer)
            case msg.Failed():
                error: PDError = reasons.peer_failed(offer.key.room, offer.peer_name, message.reason)
            case msg.Abort():
                error = reasons.peer_gave_up(offer.key.room, offer.peer_name, message.reason)
        return self._end(offer, error, now, tell_peer=False)

    def _on_room_refused(self, peer: Any, message: msg.Abort, now: float) -> list[Action]:
        self._drop_subscription(message.attempt)
        error = reasons.peer_gave_up(message.room, f"the decode instance at {peer}", message.reason)
        self._refused_rooms.add(message.room, error, now)
        actions: list[Action] = []
        for offer in list(self._offers()):
            if offer.key.room == message.room and offer.attempt in (None, message.attempt):
                actions += self._end(offer, error, now, tell_peer=False)
        return [*actions, _wait(peer, message, "no")]

    def _on_subscribe(self, peer: Any, message: msg.Subscribe, now: float) -> list[Action]:
        name = reasons.decode_instance(message.instance_id, peer)
        refusal = self._refusal(message, name)
        if refusal is not None:
            return [_farewell(peer, message.room, message.attempt, refusal)]
        if message.epoch != self._epoch:
            return [_wait(peer, message, "restarted")]
        if message.attempt in self._by_attempt:
            return self._renew(peer, message, now)
        if message.again:
            return [_wait(peer, message, "no")]  # whatever it had, it is not to be given another copy
        return self._meet(peer, message, name, now)

    def _meet(self, peer: Any, message: msg.Subscribe, name: str, now: float) -> list[Action]:
        """An attempt that has no offer yet."""
        self._drop_subscription(message.attempt)
        key = RoomKey(message.room, message.prompt)
        for offer in self._by_key.get(key, ()):
            if offer.attempt is None:
                return self._claim(offer, message.attempt, peer, name, now)
        if (error := self._ended_unasked.get(key)) is not None:
            return [_wait(peer, message, "yes"), _farewell(peer, message.room, message.attempt, error)]
        if len(self._waiting_key) < MAX_SUBSCRIPTIONS:
            self._waiting.setdefault(key, {})[message.attempt] = _Subscription(peer, name, now)
            self._waiting_key[message.attempt] = key
        return [_wait(peer, message, "other_prompt" if message.room in self._prompts_in_room else "no")]

    def _renew(self, peer: Any, message: msg.Subscribe, now: float) -> list[Action]:
        offer = self._claimed_by(message)
        if offer is None:
            return []  # an attempt is for one room
        offer.heard, offer.peer = now, peer
        if offer.uuids and message.again > offer.again:
            return self._offer_again(offer, message.again)
        return [Reply(peer, self._ready(offer, offer.uuids)) if offer.uuids else _wait(peer, message, "yes")]

    def _refusal(self, message: msg.Subscribe, name: str) -> PDError | None:
        """Why this D cannot be served at all."""
        if message.version != msg.PROTOCOL_VERSION:
            return reasons.other_version(message.room, name, message.version, msg.PROTOCOL_VERSION)
        if message.layout_digest != self._layout_digest:
            return reasons.other_layout(message.room, name, message.layout_digest, self._layout_digest)
        return None

    def _claimed_by(self, message: msg.Message) -> Offer | None:
        offer = self._by_attempt.get(message.attempt)
        return offer if offer is not None and offer.key.room == message.room else None

    # Time.

    def tick(self, now: float) -> list[Action]:
        """Ends what has outlived its deadline. O(offers); called a few times a second."""
        actions: list[Action] = []
        for offer in list(self._offers()):
            error = self._overdue(offer, now)
            if error is not None:
                actions += self._end(offer, error, now)
        stale = [
            attempt
            for waiting in self._waiting.values()
            for attempt, subscription in waiting.items()
            if now - subscription.heard > self._timeouts.lease
        ]
        for attempt in stale:
            self._drop_subscription(attempt)
        self._ended_unasked.expire(now)
        self._refused_rooms.expire(now)
        return actions

    def _overdue(self, offer: Offer, now: float) -> PDError | None:
        room, who, limits, entered = offer.key.room, offer.peer_name, self._timeouts, offer.life.entered
        if offer.attempt is not None and (silent := now - offer.heard) > limits.lease:
            return reasons.decode_silent(room, who, silent, limits.lease)
        # Whether it is copied or waits to be: what waits holds the engine's own pages.
        if (
            offer.attempt is None
            and offer.sent_at is not None
            and (age := now - offer.sent_at) > limits.lease
        ):
            return reasons.not_asked_for(room, age, limits.lease)
        if offer.packed is None:
            if (age := now - entered[KVPoll.Bootstrapping]) > limits.prefill_timeout:
                late = reasons.no_room if offer.sent else reasons.not_prefilled
                return late(room, who, age, limits.prefill_timeout)
        elif offer.uuids:
            limit = limits.prefill_timeout + limits.transfer_timeout
            if (age := now - entered[KVPoll.Transferring]) > limit:
                return reasons.not_fetched(room, who, age, limit)
        return None

    def close(self, reason: str, now: float) -> list[Action]:
        """Ends everything: this instance stops."""
        actions: list[Action] = []
        for offer in list(self._offers()):
            actions += self.abort(offer, reason, now)
        for key, waiting in self._waiting.items():
            for attempt, subscription in waiting.items():
                actions.append(
                    Reply(subscription.peer, msg.Abort(room=key.room, attempt=attempt, reason=reason))
                )
        self._waiting.clear()
        self._waiting_key.clear()
        return actions

    # Steps shared by the above.

    def _offers(self) -> Iterator[Offer]:
        for offers in self._by_key.values():
            yield from offers

    def _claim(self, offer: Offer, attempt: int, peer: Any, name: str, now: float) -> list[Action]:
        offer.attempt, offer.peer, offer.peer_name, offer.heard = attempt, peer, name, now
        self._by_attempt[attempt] = offer
        offer.life.advance(KVPoll.WaitingForInput, now)
        if offer.packed is None:
            return [Reply(peer, msg.Wait(room=offer.key.room, attempt=attempt, known="yes"))]
        return self._offer_now(offer, now)

    def _offer_now(self, offer: Offer, now: float) -> list[Action]:
        """Registers and says READY, once both the copy and a D are there."""
        if offer.attempt is None or offer.packed is None:
            return []
        offer.life.advance(KVPoll.Transferring, now)
        offer.uuids = [self._new_uuid() for _ in offer.packed]
        self.registered_bytes += offer.packed_bytes
        return [Register(offer), Reply(offer.peer, self._ready(offer, offer.uuids))]

    def _offer_again(self, offer: Offer, again: int) -> list[Action]:
        """Under fresh uuids: nobody knows how much of the old ones a pull that failed has used up."""
        old = Release(tuple(offer.uuids), 0)
        offer.retries += 1
        offer.again, offer.uuids = again, [self._new_uuid() for _ in offer.uuids]
        return [old, Register(offer), Reply(offer.peer, self._ready(offer, offer.uuids))]

    def _end(self, offer: Offer, error: PDError, now: float, *, tell_peer: bool = True) -> list[Action]:
        if not offer.life.fail(error, now):
            return []
        actions: list[Action] = []
        if offer.attempt is None:
            self._ended_unasked.add(offer.key, error, now)
        elif tell_peer:
            actions.append(_farewell(offer.peer, offer.key.room, offer.attempt, error))
        return actions + self._forget(offer)

    def _forget(self, offer: Offer) -> list[Action]:
        offers = self._by_key[offer.key]
        offers.remove(offer)
        if not offers:
            del self._by_key[offer.key]
        room = offer.key.room
        self._prompts_in_room[room] -= 1
        if not self._prompts_in_room[room]:
            del self._prompts_in_room[room]
        if offer.attempt is not None:
            del self._by_attempt[offer.attempt]
        if offer.uuids:
            self.registered_bytes -= offer.packed_bytes
        self._ended(offer)
        release = Release(tuple(offer.uuids), offer.packed_bytes)
        offer.packed, offer.packed_bytes, offer.uuids = None, 0, []
        return [release]

    def _drop_subscription(self, attempt: int) -> None:
        key = self._waiting_key.pop(attempt, None)
        if key is not None:
            waiting = self._waiting[key]
            del waiting[attempt]
            if not waiting:
                del self._waiting[key]


def _wait(peer: Any, message: msg.Message, known: Literal["no", "other_prompt", "yes", "restarted"]) -> Reply:
    return Reply(peer, msg.Wait(room=message.room, attempt=message.attempt, known=known))


def _farewell(peer: Any, room: int, attempt: int, error: PDError) -> Reply:
    kind = msg.Abort if isinstance(error, TransferAbortedError) else msg.Failed
    return Reply(peer, kind(room=room, attempt=attempt, reason=reasons.for_peer(room, error)))
