"""A network that a test can cut: TCP proxies on one event loop in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self

READ = 1 << 16


class Mode(enum.Enum):
    """What a proxy does with connections."""

    PASS = "pass"
    CLOSE = "close"
    """Connections are closed, new ones too: a peer or its host says no."""
    DROP = "drop"
    """Everything is swallowed in silence: a cable is out. Connections that were open then stay dead for ever."""


class Network:
    """Owner of the event loop's thread."""

    def __init__(self) -> None:
        self.listeners: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-network", daemon=True)
        self._thread.start()

    def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the loop's thread and waits."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    def close(self) -> None:
        """Ends everything that listens or is connected."""
        self.run(self._end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_all(self) -> None:
        for listener in self.listeners:
            listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Connection:
    """One connection through a proxy."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.client = client
        self.server: asyncio.StreamWriter | None = None
        self.dead = False

    def close(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                writer.close()

    async def wait_closed(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                with contextlib.suppress(OSError):
                    await writer.wait_closed()


Pump = Callable[[Connection, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Proxy:
    """Listens on a free port of the loopback interface and passes on to ``upstream``."""

    def __init__(self, network: Network, upstream: str) -> None:
        self._network = network
        self._upstream = upstream
        self._mode = Mode.PASS
        self._connections: set[Connection] = set()
        self.address = network.run(self._listen())

    async def _listen(self) -> str:
        self._flowing = asyncio.Event()
        self._flowing.set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._network.listeners.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def set(self, mode: Mode) -> Self:
        self._network.run(self._set(mode))
        return self

    async def _set(self, mode: Mode) -> None:
        self._mode = mode
        for connection in self._connections:
            if mode is Mode.CLOSE:
                connection.close()
            elif mode is Mode.DROP:
                connection.dead = True

    def hold(self) -> None:
        """Nothing goes through until `let_go`; everything arrives then."""
        self._network.run(self._hold())

    async def _hold(self) -> None:
        self._flowing.clear()

    def let_go(self) -> None:
        self._network.run(self._let_go())

    async def _let_go(self) -> None:
        self._flowing.set()

    def close_dead(self) -> None:
        """Ends the connections that `Mode.DROP` left behind, as a firewall's reset does in the end."""
        self._network.run(self._close_dead())

    async def _close_dead(self) -> None:
        for connection in self._connections:
            if connection.dead:
                connection.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self._connections.add(connection)
        try:
            # What is cut on purpose, or cancelled at the end, is no error.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                if self._mode is Mode.DROP:
                    connection.dead = True
                    await self.swallow(reader)
                elif self._mode is not Mode.CLOSE:
                    await self.handle(connection, reader)
        finally:
            self._connections.discard(connection)
            connection.close()
            await connection.wait_closed()

    @staticmethod
    async def swallow(reader: asyncio.StreamReader) -> None:
        """Reads until the connection ends."""
        while await reader.read(READ):
            pass

    async def handle(self, connection: Connection, reader: asyncio.StreamReader) -> None:
        """Serves one connection to its end."""
        host, _, port = self._upstream.rpartition(":")
        server_reader, connection.server = await asyncio.open_connection(host, int(port))
        await asyncio.gather(
            self._to_the_end(self.to_server, connection, reader, connection.server),
            self._to_the_end(self.to_client, connection, server_reader, connection.client),
        )

    async def _to_the_end(
        self,
        pump: Pump,
        connection: Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await pump(connection, reader, writer)
        if not connection.dead:
            connection.close()

    async def to_server(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Bytes from the client; a kind of proxy that knows what they mean does more."""
        await self.pump(connection, reader, writer)

    async def to_client(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Bytes from the server."""
        await self.pump(connection, reader, writer)

    async def pump(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(READ):
            await self.deliver(connection, writer, data)

    async def deliver(self, connection: Connection, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Writes, unless the network is cut."""
        await self._flowing.wait()
        if not connection.dead:
            writer.write(data)
            await writer.drain()
