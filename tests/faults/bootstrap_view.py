"""The bootstrap server as D sees it: every prefill instance found there is reached through a proxy."""

from __future__ import annotations

import asyncio
import json

from tests.faults.network import Connection, Network, Proxy
from tests.faults.side_channel import SideChannelProxy


class BootstrapView(Proxy):
    """Passes requests on and replaces the addresses in what comes back.

    Attributes:
        side_channels, transfers: the proxies, by the address that they stand for.
    """

    def __init__(self, network: Network, upstream: str) -> None:
        super().__init__(network, upstream)
        self.side_channels: dict[str, SideChannelProxy] = {}
        self.transfers: dict[str, Proxy] = {}

    async def handle(self, connection: Connection, reader: asyncio.StreamReader) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        host, _, port = self._upstream.rpartition(":")
        answers, connection.server = await asyncio.open_connection(host, int(port))
        connection.server.write(request.replace(b"keep-alive", b"close"))
        head, _, body = (await answers.read(-1)).partition(b"\r\n\r\n")
        status = head.split(b"\r\n", 1)[0]
        content = await self._rewritten(json.loads(body)) if b"/list?" in request else body
        lines = [status, b"Content-Length: %d" % len(content), b"Connection: close", b"", content]
        await self.deliver(connection, connection.client, b"\r\n".join(lines))

    async def _rewritten(self, listing: dict[str, list[dict[str, str]]]) -> bytes:
        for route in listing["routes"]:
            route["zmq_addr"] = await self._side_channel(route["zmq_addr"])
            route["transfer_addr"] = await self._transfer(route["transfer_addr"])
        return json.dumps(listing).encode()

    async def _side_channel(self, address: str) -> str:
        if address not in self.side_channels:
            self.side_channels[address] = await asyncio.to_thread(SideChannelProxy, self._network, address)
        return self.side_channels[address].address

    async def _transfer(self, address: str) -> str:
        if address not in self.transfers:
            self.transfers[address] = await asyncio.to_thread(Proxy, self._network, address)
        return self.transfers[address].address

    @property
    def side_channel(self) -> SideChannelProxy:
        """That of the newest prefill instance."""
        return list(self.side_channels.values())[-1]

    @property
    def proxies(self) -> list[Proxy]:
        """All there ever were, this one included."""
        return [self, *self.side_channels.values(), *self.transfers.values()]
