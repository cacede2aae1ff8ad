"""What both ends of the side channel ask of their ZMQ sockets."""

from __future__ import annotations

import zmq

from sgl_pd_connector.wire.frames import MAX_SIGNED_FRAME

SEND_QUEUE = 1000
"""Frames waiting for one slow or dead peer. Beyond it they are dropped: every message is repeated on demand."""

LINGER_MS = 500


def configure(socket: zmq.Socket[bytes], *, peer_timeout: float) -> None:
    """Bounds single frames and what waits for a slow peer, and ends connections whose other end has vanished.

    What a peer can make it hold is not bounded: libzmq collects the parts of a message until the last has come, however
    many, and signatures can be looked at only then. Strangers have to be kept away from the port by the network.

    Without the heartbeats, which ZMQ exchanges by itself, a connection whose other end lost power, or that a firewall
    forgot, would stay: for ever on P, which has nothing to send on it, and on D until TCP gives up, a quarter of an
    hour in which every request to that P fails.

    Args:
        socket: not yet bound or connected.
        peer_timeout: seconds after which a silent peer is taken as dead. The connection is made anew before that.
    """
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_SIGNED_FRAME)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    # Half of it leaves the other half for the request that finds a dead connection.
    silence = max(2, int(peer_timeout * 500))
    socket.setsockopt(zmq.HEARTBEAT_IVL, silence // 2)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence)
    # A connection made while the network is silent must not wait half a minute for the other end's greeting either.
    socket.setsockopt(zmq.HANDSHAKE_IVL, silence)
