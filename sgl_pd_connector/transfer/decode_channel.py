"""D's side channel: the thread that drives the `InterestTable` with DEALER sockets, look-ups and a clock.

The thread owns the table and the sockets. Look-ups at the bootstrap server block, so they run in a small pool of their
own and come back as commands. Other threads only queue commands.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import zmq

from sgl_pd_connector.errors import BootstrapError, PDError, ProtocolError
from sgl_pd_connector.transfer.bad_frames import BadFrames
from sgl_pd_connector.transfer.interest import Action, Interest, LookUp, Lost, PeerRoute, Send
from sgl_pd_connector.transfer.interests import InterestTable
from sgl_pd_connector.transfer.known_routes import KnownRoutes
from sgl_pd_connector.transfer.side_socket import LINGER_MS, configure
from sgl_pd_connector.transfer.wakeup import CommandQueue
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.frames import FrameCodec

logger = logging.getLogger(__name__)

TICK = 0.1
TICK_MS = int(TICK * 1000)
# Each bootstrap server that does not answer occupies one for `peer_timeout`; the others must not wait for it.
LOOKUP_THREADS = 32
# A socket that nobody used for so long belongs to a peer that is gone.
SOCKET_IDLE = 120.0
RECEIVE_BURST = 256

RouteLookup = Callable[[str], Sequence[PeerRoute]]
"""Prefill instances registered at a bootstrap address and usable from here. May block; raises `PDError`."""


@dataclass
class _Line:
    """A socket to one P."""

    socket: zmq.Socket[bytes]
    used: float


class DecodeChannel:
    """Speaks the side channel with every prefill instance of one decode instance."""

    def __init__(
        self,
        table: InterestTable,
        *,
        codec: FrameCodec,
        look_up: RouteLookup,
        known: KnownRoutes,
        peer_timeout: float,
    ) -> None:
        """
        Args:
            table: handed over: from now on only this thread touches it.
            codec: handed over likewise.
            look_up: asks a bootstrap server.
            known: handed over likewise; its answers so far.
            peer_timeout: see `side_socket.configure`.
        """
        self._table = table
        self._codec = codec
        self._look_up = look_up
        self._known = known
        self._peer_timeout = peer_timeout
        self._commands = CommandQueue()
        self._stopping = False
        self.bad_frames = BadFrames("decode side channel")
        self._context = zmq.Context()
        self._lines: dict[PeerRoute, _Line] = {}
        # Who waits for the look-up that is under way at a bootstrap address: one at a time, so that a server that does
        # not answer costs one thread and no queue.
        self._looking: dict[str, list[Interest]] = {}
        self._poller = zmq.Poller()
        self._lookups = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="sgl-pd-lookup")
        self._thread = threading.Thread(target=self._run, name="sgl-pd-decode-channel", daemon=True)
        self._thread.start()

    @property
    def num_interests(self) -> int:
        """Requests that are not over."""
        return len(self._table)

    # Any thread.

    def add(self, interest: Interest) -> bool:
        """False once closed."""
        return self._commands.put(lambda: self._execute(self._table.add(interest, time.monotonic())))

    def refused(self, interest: Interest) -> None:
        """P is told that nobody will ask for anything in the room."""
        self._commands.put(lambda: self._execute(self._table.refused(interest, time.monotonic())))

    def offer_again(self, interest: Interest) -> None:
        """P is asked for another offer."""
        self._commands.put(lambda: self._execute(self._table.offer_again(interest, time.monotonic())))

    def over(self, interest: Interest) -> None:
        """The interest's life has ended: P is told at once."""
        self._commands.put(lambda: self._execute(self._table.over(interest, time.monotonic())))

    def close(self) -> None:
        """Aborts every interest, tells the peers and ends the threads."""
        if not self._stopping:
            self._stopping = True
            self._commands.put(lambda: None)
            self._thread.join()
            self._lookups.shutdown(wait=True, cancel_futures=True)
            self._commands.close()

    # The thread.

    def _run(self) -> None:
        self._poller.register(self._commands.fd, zmq.POLLIN)
        next_tick = 0.0
        while not self._stopping:
            try:
                self._poller.poll(TICK_MS)
                for command in self._commands.drain():
                    command()
                for route, line in list(self._lines.items()):
                    self._receive(route, line)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + TICK
                    self._execute(self._table.tick(now))
                    self._close_idle(now)
            except Exception:
                # Nothing a peer sends or one request does may end the service of all the others.
                logger.exception("decode side channel: unexpected error; going on")
        try:
            for command in self._commands.drain():
                command()
            self._execute(self._table.close("this decode instance is stopping", time.monotonic()))
        finally:
            for line in self._lines.values():
                line.socket.close(LINGER_MS)
            self._lines.clear()
            self._context.term()

    def _receive(self, route: PeerRoute, line: _Line) -> None:
        for _ in range(RECEIVE_BURST):
            try:
                frames = line.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"{len(frames)} frames where one is expected")
                message = self._codec.decode(frames[0], time.time())
            except ProtocolError as error:
                self.bad_frames.add(error, route)
                continue
            line.used = time.monotonic()
            self._execute(self._table.on_message(route, message, line.used))

    def _execute(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case LookUp():
                    self._start_lookup(action.interest)
                case Lost():
                    self._known.forget(action.route)
                case Send():
                    self._send(action.route, action.message)

    def _start_lookup(self, interest: Interest) -> None:
        addr, now = interest.bootstrap_addr, time.monotonic()
        known = self._known.get(addr)
        if self._known.is_fresh(addr, now):
            self._execute(self._table.found(interest, known, now))
            return
        self._execute(self._table.suggest(interest, known, now))
        if addr in self._looking:
            self._looking[addr].append(interest)
        elif not self._stopping:
            self._looking[addr] = [interest]
            try:
                self._lookups.submit(self._lookup, addr)
            except RuntimeError as error:  # no thread can be started
                failed = BootstrapError(f"look-up at bootstrap server {addr} not begun: {error}")
                self._commands.put(lambda: self._looked_up(addr, failed))

    def _lookup(self, addr: str) -> None:
        """On a look-up thread: asks, and queues the answer."""
        answer: Sequence[PeerRoute] | PDError
        try:
            answer = self._look_up(addr)
        except PDError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - whatever it was, the requests must hear of it
            answer = BootstrapError(f"look-up at bootstrap server {addr} failed: {error!r}")
        self._commands.put(lambda: self._looked_up(addr, answer))

    def _looked_up(self, addr: str, answer: Sequence[PeerRoute] | PDError) -> None:
        now = time.monotonic()
        interests = self._looking.pop(addr)
        if isinstance(answer, PDError):
            for interest in interests:
                self._execute(self._table.not_found(interest, answer, now))
            return
        self._known.learn(addr, answer, now)
        for interest in interests:
            self._execute(self._table.found(interest, answer, now))

    def _send(self, route: PeerRoute, message: msg.Message) -> None:
        try:
            line = self._lines.get(route) or self._connect(route)
            line.used = time.monotonic()
            line.socket.send(self._codec.encode(message, time.time()), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("room %d: %s to %s not sent: %s", message.room, message.type.upper(), route, error)

    def _connect(self, route: PeerRoute) -> _Line:
        socket = self._context.socket(zmq.DEALER)
        try:
            configure(socket, peer_timeout=self._peer_timeout)
            socket.connect(f"tcp://{route.zmq_addr}")
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._poller.register(socket, zmq.POLLIN)
        line = self._lines[route] = _Line(socket, time.monotonic())
        return line

    def _close_idle(self, now: float) -> None:
        for route in [route for route, line in self._lines.items() if now - line.used > SOCKET_IDLE]:
            line = self._lines.pop(route)
            self._poller.unregister(line.socket)
            line.socket.close(0)
