"""P's side channel: the thread that drives the `OfferTable` with a ROUTER socket and a clock.

The thread owns the table, the socket and every call that registers or releases buffers. Other threads only queue
commands for it, so nothing here needs a lock and the engine's thread never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from sgl_pd_connector.errors import ConfigError, PDError, ProtocolError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.bad_frames import BadFrames
from sgl_pd_connector.transfer.budget import ByteBudget
from sgl_pd_connector.transfer.offers import Action, Offer, OfferTable, PackedChunk, Register, Release, Reply
from sgl_pd_connector.transfer.side_socket import LINGER_MS, configure
from sgl_pd_connector.transfer.transport import Transport
from sgl_pd_connector.transfer.wakeup import CommandQueue
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.frames import FrameCodec

logger = logging.getLogger(__name__)

TICK = 0.1
TICK_MS = int(TICK * 1000)
SWEEP = 1.0
# Frames taken before deadlines are looked at again, so that a flood cannot hold them up.
RECEIVE_BURST = 256


class _Sender(NamedTuple):
    """A D: how ROUTER calls its connection, and where it is."""

    identity: bytes
    address: str

    def __str__(self) -> str:
        return self.address


class PrefillChannel:
    """Serves the side channel of one prefill instance."""

    def __init__(
        self,
        table: OfferTable,
        *,
        transport: Transport,
        budget: ByteBudget,
        codec: FrameCodec,
        address: Address,
        peer_timeout: float,
        offer_lifetime: float,
    ) -> None:
        """Binds at once, so that a port in use is the caller's error.

        Args:
            table: handed over: from now on only this thread touches it.
            transport: where packed chunks are registered.
            budget: gets the bytes of ended offers back.
            codec: handed over likewise.
            address: numeric host and port to bind; port 0 takes a free one.
            peer_timeout: see `side_socket.configure`.
            offer_lifetime: seconds after which the transport may drop a registration by itself.
        """
        self._table = table
        self._transport = transport
        self._budget = budget
        self._codec = codec
        self._offer_lifetime = offer_lifetime
        self._commands = CommandQueue()
        self._stopping = False
        self.bad_frames = BadFrames("prefill side channel")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, peer_timeout=peer_timeout)
        try:
            self._socket.bind(address.url(scheme="tcp"))
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._context.term()
            self._commands.close()
            raise ConfigError(
                f"cannot bind the side channel to {address}: {error}; see settings host and side_channel_port"
            ) from error
        endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self.zmq_addr = str(
            Address.of(address.host, Address.parse(endpoint, setting="host").port, setting="host")
        )
        self._thread = threading.Thread(target=self._run, name="sgl-pd-prefill-channel", daemon=True)
        self._thread.start()

    @property
    def registered_bytes(self) -> int:
        """Bytes registered with the transport now."""
        return self._table.registered_bytes

    @property
    def num_offers(self) -> int:
        """Requests that are not over."""
        return len(self._table)

    # Any thread.

    def add(self, offer: Offer) -> bool:
        """False once closed."""
        return self._commands.put(lambda: self._execute(self._table.add(offer, time.monotonic())))

    def packed(self, offer: Offer, packed: Sequence[PackedChunk], packed_bytes: int) -> None:
        self._commands.put(
            lambda: self._execute(self._table.packed(offer, packed, packed_bytes, time.monotonic()))
        )

    def abort(self, offer: Offer, reason: str) -> None:
        self._commands.put(lambda: self._execute(self._table.abort(offer, reason, time.monotonic())))

    def fail(self, offer: Offer, error: PDError) -> None:
        self._commands.put(lambda: self._execute(self._table.fail(offer, error, time.monotonic())))

    def close(self) -> None:
        """Aborts every offer, tells the peers and ends the thread."""
        if not self._stopping:
            self._stopping = True
            self._commands.put(lambda: None)
            self._thread.join()
            self._commands.close()

    # The thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._commands.fd, zmq.POLLIN)
        next_sweep = 0.0
        next_tick = 0.0
        while not self._stopping:
            try:
                poller.poll(TICK_MS)
                for command in self._commands.drain():
                    command()
                self._receive()
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK
                    self._execute(self._table.tick(now))
                if now >= next_sweep:
                    next_sweep = now + SWEEP
                    self._transport.sweep()
            except Exception:
                # Nothing a peer sends or one request does may end the service of all the others.
                logger.exception("prefill side channel: unexpected error; going on")
        try:
            for command in self._commands.drain():
                command()
            self._execute(self._table.close("this prefill instance is stopping", time.monotonic()))
        finally:
            self._socket.close(LINGER_MS)
            self._context.term()

    def _receive(self) -> None:
        for _ in range(RECEIVE_BURST):
            try:
                # Not copied: the address of who sent it is known of a whole frame only.
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            # An IPv4 address in IPv6 notation, as the socket accepts both.
            address = str(frames[-1].get("Peer-Address")).removeprefix("::ffff:")
            sender = _Sender(frames[0].bytes, address)
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"{len(frames) - 1} frames where one is expected")
                message = self._codec.decode(frames[1].bytes, time.time())
            except ProtocolError as error:
                self.bad_frames.add(error, sender)
                continue
            self._execute(self._table.on_message(sender, message, time.monotonic()))

    def _execute(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Reply():
                    self._reply(action.peer, action.message)
                case Register():
                    if not self._register(action.offer):
                        return
                case Release():
                    self._release(action)

    def _register(self, offer: Offer) -> bool:
        try:
            for uuid, packed in zip(offer.uuids, offer.packed or (), strict=True):
                self._transport.register(uuid, packed.buffers, self._offer_lifetime)
        except Exception as error:
            failure = reasons.not_registered(offer.key.room, offer.peer_name, error)
            logger.exception("%s", failure)
            self._execute(self._table.fail(offer, failure, time.monotonic()))
            return False
        return True

    def _release(self, action: Release) -> None:
        for uuid in action.uuids:
            try:
                self._transport.release(uuid)
            except Exception:
                # The transport lets go by itself in time; the rest of this action and of the others must be done.
                logger.exception("cannot take an offer back from this instance's native transfer server")
        self._budget.give(action.packed_bytes)

    def _reply(self, peer: _Sender, message: msg.Message) -> None:
        try:
            frames = [peer.identity, self._codec.encode(message, time.time())]
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning(
                "room %d: %s to the decode instance at %s not sent: %s",
                message.room,
                message.type.upper(),
                peer,
                error,
            )
