"""Ends connections of the native transfer server on which a peer takes nothing any more.

The native server sends from few threads, and one that waits for a peer waits for ever: a single D that is stopped, or
whose machine lost power in the middle of a transfer, keeps P from serving every other D until TCP gives up, a quarter
of an hour later. The native interface offers no way out, but its sockets are this process's own: shutting the stalled
one down makes the send fail, and the server goes on with the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import socket
import struct
import termios

from sgl_pd_connector.transfer.own_sockets import own_sockets

logger = logging.getLogger(__name__)

# In struct tcp_info of <linux/tcp.h>, since Linux 4.1.
_BYTES_ACKED = struct.Struct("120x Q")


class StallWatch:
    """Looks at the connections to some of this process's ports. Not thread-safe: one thread's."""

    def __init__(self, ports: set[int], limit: float) -> None:
        """
        Args:
            ports: local ports that belong to the native server.
            limit: seconds without progress, while there is something to send, after which a connection is ended.
        """
        self._ports = ports
        self._limit = limit
        self._stuck: dict[object, tuple[int, float]] = {}

    def look(self, now: float) -> int:
        """Ends what has been stalled for too long, and returns how many. Call it about once a second."""
        stuck: dict[object, tuple[int, float]] = {}
        ended = 0
        for sock in own_sockets():
            # A connection may end while it is looked at.
            with contextlib.suppress(OSError):
                if sock.getsockname()[1] not in self._ports or not _unsent(sock):
                    continue
                peer = sock.getpeername()
                acked = _bytes_acked(sock)
                before, since = self._stuck.get(peer, (acked, now))
                if acked != before:
                    since = now
                stuck[peer] = acked, since
                if now - since > self._limit:
                    sock.shutdown(socket.SHUT_RDWR)
                    ended += 1
                    # What was sent stays with the kernel until the peer is gone: not to be ended, and told, again.
                    stuck[peer] = acked, math.inf
                    logger.warning(
                        "transfer connection to the decode instance at %s ended: it has taken nothing for %.1f s "
                        "(setting peer_timeout = %g s)",
                        peer[0],
                        now - since,
                        self._limit,
                    )
        self._stuck = stuck
        return ended


def _unsent(sock: socket.socket) -> int:
    """Bytes that the peer has not confirmed."""
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])


def _bytes_acked(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    return int(_BYTES_ACKED.unpack(info)[0]) if len(info) == _BYTES_ACKED.size else 0
