"""A proxy that understands the side channel: loses, repeats, delays, damages or withholds single messages.

It follows ZMTP 3 (rfc.zeromq.org/spec/23): a greeting of 64 bytes, then frames of one byte of flags, a length of one
or eight bytes, and the body. A message here is one frame; commands, such as heartbeats, pass.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from sgl_pd_connector.wire import frames
from sgl_pd_connector.wire import messages as msg
from tests.faults.network import Connection, Network, Proxy

GREETING = 64
LONG, COMMAND = 0x02, 0x04
SIGNED = b"\xc1"

Deliver = tuple[float, bytes]
"""Seconds from now, and the body of a message."""

Rule = Callable[[msg.Message, bytes], list[Deliver]]


class SideChannelProxy(Proxy):
    """The side channel of one P."""

    def __init__(self, network: Network, upstream: str) -> None:
        super().__init__(network, upstream)
        self.rule: Rule = untouched
        self._withheld: set[tuple[type[msg.Message], int]] = set()
        self._withheld_frames: list[tuple[Connection, asyncio.StreamWriter, bytes, bytes]] = []
        self._delayed: set[asyncio.Task[None]] = set()

    def withhold(self, kind: type[msg.Message], room: int) -> None:
        """Keeps messages of that kind for that room back, until `hand_on` or `discard`."""
        self._withheld.add((kind, room))

    @property
    def num_withheld(self) -> int:
        return len(self._withheld_frames)

    def hand_on(self) -> None:
        self._network.run(self._hand_on())

    async def _hand_on(self) -> None:
        self._withheld.clear()
        frames, self._withheld_frames = self._withheld_frames, []
        for connection, writer, head, body in frames:
            if not writer.is_closing():
                await self._deliver_message(connection, writer, head, body)

    def discard(self) -> None:
        self._withheld.clear()
        self._withheld_frames.clear()

    async def pump(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # Byte by byte: either end waits for the first half of the other's greeting before it sends its second.
        for _ in range(GREETING):
            await self.deliver(connection, writer, await reader.readexactly(1))
        while True:
            head = await reader.readexactly(1)
            head += await reader.readexactly(8 if head[0] & LONG else 1)
            body = await reader.readexactly(int.from_bytes(head[1:]))
            if head[0] & COMMAND:
                await self.deliver(connection, writer, head + body)
                continue
            message = read(body)
            if (type(message), message.room) in self._withheld:
                self._withheld_frames.append((connection, writer, head, body))
            else:
                await self._deliver_message(connection, writer, head, body)

    async def _deliver_message(
        self, connection: Connection, writer: asyncio.StreamWriter, head: bytes, body: bytes
    ) -> None:
        for delay, changed in self.rule(read(body), body):
            assert len(changed) == len(body)
            if delay:
                task = asyncio.create_task(self._later(delay, connection, writer, head + changed))
                self._delayed.add(task)
                task.add_done_callback(self._delayed.discard)
            else:
                await self.deliver(connection, writer, head + changed)

    async def _later(
        self, delay: float, connection: Connection, writer: asyncio.StreamWriter, frame: bytes
    ) -> None:
        await asyncio.sleep(delay)
        if not writer.is_closing():
            await self.deliver(connection, writer, frame)


def read(frame: bytes) -> msg.Message:
    """The message in a frame, signed or not."""
    signed = frame[:1] == SIGNED
    return msg.decode(frame[frames.MAX_SIGNED_FRAME - msg.MAX_FRAME :] if signed else frame)


def untouched(_message: msg.Message, body: bytes) -> list[Deliver]:
    return [(0.0, body)]


class FirstOfEachKind:
    """True for the first message of every kind in every attempt."""

    def __init__(self) -> None:
        self._seen: set[tuple[type[msg.Message], int]] = set()

    def __call__(self, message: msg.Message) -> bool:
        key = type(message), message.attempt
        first = key not in self._seen
        self._seen.add(key)
        return first


def losing() -> Rule:
    """Loses the first message of every kind."""
    is_first = FirstOfEachKind()
    return lambda message, body: [] if is_first(message) else [(0.0, body)]


def repeating() -> Rule:
    """Delivers every message three times, the last one late."""
    return lambda _message, body: [(0.0, body), (0.0, body), (0.7, body)]


def delaying(seed: int) -> Rule:
    """Delays every message by a time of its own, so that they overtake each other."""
    generator = random.Random(seed)
    return lambda _message, body: [(generator.uniform(0.01, 0.7), body)]


def damaging(seed: int) -> Rule:
    """Changes a few bytes in the first message of every kind."""
    generator = random.Random(seed)
    is_first = FirstOfEachKind()

    def rule(message: msg.Message, body: bytes) -> list[Deliver]:
        if not is_first(message):
            return [(0.0, body)]
        damaged = bytearray(body)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] ^= generator.randint(1, 255)
        return [(0.0, bytes(damaged))]

    return rule
