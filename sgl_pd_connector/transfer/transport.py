"""What the data plane asks of a transport: offer buffers under a number, fetch them by it, let go.

`jax.experimental.transfer` is the only one today (see `engine`). The interface is kept this small so that another can
stand beside it: host memory over plain TCP, shared memory on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax


class Peer(NamedTuple):
    """A prefill instance's transfer server. A restarted instance has a new epoch and so is another peer.

    Attributes:
        transfer_addr: where to connect.
        transfer_ports: all ports on which it listens, for data too.
    """

    instance_id: str
    epoch: int
    transfer_addr: str
    transfer_ports: tuple[int, ...] = ()


class Link(Protocol):
    """A connection to one peer."""

    def pull(self, uuid: int, specs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Starts fetching what the peer registered under ``uuid``; must not block.

        The arrays become ready one by one. A failure is a ready array that raises when used; a peer that does not
        answer leaves them not ready for ever: the caller keeps a clock.
        """

    def is_whole(self) -> bool:
        """Whether all of its connections still stand.

        Asked after arrays are ready: what a connection delivers while it breaks may be cut off and show no error.
        """

    def retire(self) -> None:
        """Another link to the same peer may be made from now on; transfers that use this one go on with it."""

    def cut(self) -> None:
        """After `retire`: fails every pull still pending on it and lets go of sockets and threads; must not block."""


class Transport(Protocol):
    """One per process."""

    def register(self, uuid: int, buffers: Sequence[jax.Array], lifetime: float) -> None:
        """Offers buffers to whoever knows ``uuid``, for at most ``lifetime`` seconds. Must not block."""

    def release(self, uuid: int) -> None:
        """Takes an offer back and lets its buffers go. Harmless if it was fetched already."""

    def sweep(self) -> None:
        """Makes expired offers and peers that take nothing go away; called about once a second."""

    def link(self, peer: Peer) -> Link:
        """A new connection to a peer."""
