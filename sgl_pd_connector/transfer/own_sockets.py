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
from typing import NamedTuple

from sgl_pd_connector.wire.address import Address

_ESTABLISHED = 1  # in <net/tcp_states.h>, and the first byte of struct tcp_info

Inode = int
"""What tells one socket of this machine from another; not used again when a descriptor is."""


class Descriptor(NamedTuple):
    """A socket and where the process has it. Not kept open: closed, the number may become another's."""

    number: int
    inode: Inode

    def is_established(self) -> bool:
        """Whether it is still there and neither end has closed or lost the connection."""
        with contextlib.suppress(OSError), _duplicate(self.number) as sock:
            state: int = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            return os.fstat(sock.fileno()).st_ino == self.inode and state == _ESTABLISHED
        return False


def own_sockets() -> Iterator[socket.socket]:
    """Every TCP socket of this process, each for as long as it is looked at."""
    for _, sock in _numbered():
        yield sock


def _numbered() -> Iterator[tuple[int, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):
        # Other threads open and close what they like meanwhile.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with _duplicate(int(name)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield int(name), sock


def _duplicate(number: int) -> socket.socket:
    duplicate = os.dup(number)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


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
        return {descriptor.inode for descriptor in self.descriptors()}

    def descriptors(self) -> list[Descriptor]:
        """The same, with their numbers."""
        return [Descriptor(number, os.fstat(sock.fileno()).st_ino) for number, sock in self._sockets()]

    def hang_up(self, inodes: Set[Inode]) -> int:
        """Shuts down those of this process's connections to it that ``inodes`` names, and returns how many."""
        count = 0
        for _, sock in self._sockets():
            if os.fstat(sock.fileno()).st_ino in inodes:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count

    def _sockets(self) -> Iterator[tuple[int, socket.socket]]:
        ip = Address(self.host, 0).ip
        for number, sock in _numbered():
            try:
                name = sock.getpeername()
            except OSError:
                continue  # listens, or is not connected yet or any more
            if name[1] in self.ports and Address(name[0], name[1]).ip == ip:
                yield number, sock
