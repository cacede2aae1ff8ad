"""This process's own TCP sockets, whoever opened them.

The native transfer server takes no orders about its connections, neither on P, where one may wait for ever for a D that
takes nothing, nor on D, where one may wait for ever for the rest of a message. But its sockets are this process's, and
shutting one down makes whoever waits on it go on with an error.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Set
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

Inode = int
"""What tells one socket of this machine from another; not used again when a descriptor is."""


def own_sockets() -> Iterator[socket.socket]:
    """Every TCP socket of this process, each for as long as it is looked at."""
    for name in os.listdir("/proc/self/fd"):
        # Other threads open and close what they like meanwhile.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            number = os.dup(int(name))
            try:
                sock = socket.socket(fileno=number)
            except OSError:
                os.close(number)
                continue
            with sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield sock


def listening_ports() -> set[int]:
    """TCP ports on which this process listens."""
    return {
        sock.getsockname()[1]
        for sock in own_sockets()
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


@dataclass(frozen=True)
class Remote:
    """Where another process listens: one address, several ports."""

    host: str
    ports: frozenset[int]

    def connections(self) -> set[Inode]:
        """This process's connections to it."""
        return {os.fstat(sock.fileno()).st_ino for sock in self._sockets()}

    def hang_up(self, inodes: Set[Inode]) -> int:
        """Shuts down those of this process's connections to it that ``inodes`` names, and returns how many."""
        count = 0
        for sock in self._sockets():
            if os.fstat(sock.fileno()).st_ino in inodes:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    def _sockets(self) -> Iterator[socket.socket]:
        host = _numeric(self.host)
        for sock in own_sockets():
            try:
                name = sock.getpeername()
            except OSError:
                continue  # listens, or is not connected yet or any more
            if name[1] in self.ports and _numeric(name[0]) == host:
                yield sock


def _numeric(host: str) -> object:
    """Comparable: an IPv4 address is the same address on a socket for both families."""
    address = ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
