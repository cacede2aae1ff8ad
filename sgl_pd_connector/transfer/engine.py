"""`JaxTransferKVEngine`: the transport over `jax.experimental.transfer`.

That module is experimental. It has no cancel, reports no failure of a peer, and aborts the process when the two sides'
channel counts or address families differ. What is measured about it stands in docs/protocol.md; what follows from it
stands here, next to each line that exists because of it.
"""

from __future__ import annotations

import datetime
import logging
import secrets
import time
from collections.abc import Sequence

import jax
from jax.experimental import transfer

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.transfer.own_sockets import Descriptor, Remote, listening_ports
from sgl_pd_connector.transfer.stalled import StallWatch
from sgl_pd_connector.transfer.transport import Peer
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.messages import MAX_UUID

logger = logging.getLogger(__name__)

PARALLEL_COPIES = 8
# The native expiry counts whole seconds, rounded down.
MIN_LIFETIME = 2.0
RELEASED_LIFETIME = 30.0
"""For so long a pull of what was taken back gets an error instead of hanging."""


def new_uuid() -> int:
    """A number that cannot be guessed: knowing it is all it takes to fetch the data."""
    return secrets.randbelow(MAX_UUID) + 1


class JaxLink:
    """A connection to one peer, over a native server of its own.

    A stalled peer wedges every pull of the native server that it is connected to, so no two peers share one.
    """

    def __init__(self, server: transfer.TransferServer, peer: Peer, channels: int) -> None:
        address = Address.parse(peer.transfer_addr, setting="transfer_addr")
        self._remote = Remote(address.host, frozenset({address.port, *peer.transfer_ports}))
        self._of_others = self._remote.connections()
        # One for control; the others are found by ports that P may not have registered.
        self._num_connections = 1 + channels if peer.transfer_ports else 1
        self._connections: list[Descriptor] | None = None
        self._server: transfer.TransferServer | None = server
        self._connection: transfer.TransferConnection | None = server.connect(peer.transfer_addr)

    def pull(self, uuid: int, specs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        if self._connection is None:
            raise RuntimeError("the connection was cut after an error on it")
        return list(self._connection.pull(uuid, list(specs)))

    def is_whole(self) -> bool:
        # All are there from the start; which they are is looked for once.
        connections = self._found() if self._connections is None else self._connections
        if len(connections) < self._num_connections:
            logger.warning(
                "%d of %d connections to the transfer server at %s are there; what came over them is not trusted",
                len(connections),
                self._num_connections,
                self._remote.host,
            )
            return False
        self._connections = connections
        return all(connection.is_established() for connection in connections)

    def retire(self) -> None:
        if self._connections is None:
            self._connections = self._found()  # before there are others to the same peer

    def _found(self) -> list[Descriptor]:
        try:
            return [found for found in self._remote.descriptors() if found.inode not in self._of_others]
        except OSError as error:  # it takes a descriptor to look at them, and there may be none left
            logger.warning(
                "cannot look at the connections to the transfer server at %s: %s", self._remote.host, error
            )
            return []

    def cut(self) -> None:
        # Deleting a native server while a thread of its waits for the rest of a message freezes the process, GIL held,
        # for as long as the peer is stopped: so the threads' sockets are ended first.
        try:
            self._remote.hang_up({connection.inode for connection in self._connections or ()})
        except OSError as error:
            logger.warning(
                "cannot end the connections to the transfer server at %s: %s", self._remote.host, error
            )
        # Poisoned but kept, a connection wedges P for everybody.
        connection, self._connection = self._connection, None
        if connection is not None:
            connection._poison_connection()  # type: ignore[attr-defined]
        del connection
        self._server = None


class JaxTransferKVEngine:
    """One native server for offers (P), one native server per peer for pulls (D).

    Owner of all native objects of the process. `register`, `release` and `sweep` are called by P's channel thread,
    `link` by D's pull thread only.
    """

    def __init__(
        self, *, host: str, port: int, channels: int, transfer_size: int, serve: bool, stall_timeout: float
    ) -> None:
        """Starts the native server if ``serve``.

        Args:
            host: numeric address to bind; a name would silently become 0.0.0.0.
            port: 0 takes a free one. Two processes can bind the same port here and share its connections at random,
                so a fixed one must really be free.
            channels: TCP connections per peer; equal on both sides, or the native code aborts.
            transfer_size: bytes per message; equal on both sides, or pulls hang.
            stall_timeout: seconds after which a peer that takes nothing of what is sent to it is cut off.
        """
        self._host = host
        self._channels = channels
        self._transfer_size = transfer_size
        self._client = jax.local_devices()[0].client
        self._server: transfer.TransferServer | None = None
        self.transfer_addr = ""
        self.transfer_ports: tuple[int, ...] = ()
        if serve:
            others = listening_ports()
            self._server = self._start_server(port)
            self.transfer_ports = tuple(sorted(listening_ports() - others))
            self._stalls = StallWatch(set(self.transfer_ports), stall_timeout)
            bound = Address.parse(self._server.address(), setting="the native transfer server's address")
            self.transfer_addr = str(Address.of(host, bound.port, setting="host"))

    def _start_server(self, port: int) -> transfer.TransferServer:
        address = str(Address.of(self._host, port, setting="host"))
        # Without explicit transport addresses the process aborts when a peer connects.
        data = [str(Address.of(self._host, 0, setting="host"))] * self._channels
        try:
            server: transfer.TransferServer = transfer.start_transfer_server(
                self._client,
                address,
                data,
                max_num_parallel_copies=PARALLEL_COPIES,
                transfer_size=self._transfer_size,
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"cannot start the transfer server on {address}: {error}; see settings host and transfer_port"
            ) from error
        return server

    def register(self, uuid: int, buffers: Sequence[jax.Array], lifetime: float) -> None:
        # Never without an end: an offer of nothing, too, takes 160 bytes until it is pulled, and none of those is.
        assert self._server is not None, "this process does not serve"
        expiry = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=max(lifetime, MIN_LIFETIME))
        self._server.await_pull(uuid, list(buffers), timeout=expiry)

    def release(self, uuid: int) -> None:
        # An offer owns its buffers whatever Python drops. Offering nothing in its place frees them at once, and a late
        # pull then gets an error instead of hanging.
        self.register(uuid, [], RELEASED_LIFETIME)

    def sweep(self) -> None:
        # Expiry happens only when the server next handles an offer or a pull: so offer nothing, once in a while.
        if self._server is not None:
            self.register(new_uuid(), [], MIN_LIFETIME)
            self._stalls.look(time.monotonic())

    def link(self, peer: Peer) -> JaxLink:
        return JaxLink(self._start_server(0), peer, self._channels)
