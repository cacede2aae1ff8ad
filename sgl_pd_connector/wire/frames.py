"""Messages to frames and back: signed when the deployment has a shared secret.

A signed frame is ``C1 | session 8 | sequence 8 | milliseconds 8 | MAC 32 | MessagePack``, integers big-endian, the MAC
over everything else. ``C1`` is the one byte that no MessagePack starts with, so each side can say what the other lacks.

Replays: a frame is accepted once, and only while its time stamp is near. Within that window every session's sequence
numbers are remembered, as in IPsec's anti-replay window (RFC 4303, 3.4.3).
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass

from sgl_pd_connector.errors import ProtocolError
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.secret import derive_key

MAX_SKEW = 60.0
"""Seconds by which a frame's time stamp may differ from the receiver's clock."""

WINDOW = 4096
"""Sequence numbers remembered per session; an older one is refused."""

_MARK = 0xC1
_HEADER = struct.Struct(">BQQQ")
_MAC_BYTES = 32
_OVERHEAD = _HEADER.size + _MAC_BYTES
MAX_SIGNED_FRAME = msg.MAX_FRAME + _OVERHEAD


@dataclass
class _Session:
    """What has been seen of one sender: the highest number and a bitmap of those just below it."""

    highest: int = -1
    seen: int = 0
    heard: float = 0.0

    def accept(self, sequence: int) -> bool:
        ahead = sequence - self.highest
        if ahead > 0:
            self.seen = (self.seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self.highest = sequence
            return True
        bit = 1 << -ahead
        if -ahead >= WINDOW or self.seen & bit:
            return False
        self.seen |= bit
        return True


class FrameCodec:
    """Encodes and decodes the frames of one process. Not thread-safe: one thread's.

    ``now`` is the wall clock in seconds; it only matters with a secret.
    """

    def __init__(self, secret: str | None) -> None:
        self._key = derive_key(secret, "side channel") if secret is not None else None
        self._session = secrets.randbits(64)
        self._sequence = 0
        self._sessions: dict[int, _Session] = {}
        self._purge_at = 0.0

    def encode(self, message: msg.Message, now: float) -> bytes:
        payload = msg.encode(message)
        if self._key is None:
            return payload
        header = _HEADER.pack(_MARK, self._session, self._sequence, int(now * 1000))
        self._sequence += 1
        return header + self._mac(header, payload) + payload

    def decode(self, frame: bytes, now: float) -> msg.Message:
        """
        Raises:
            ProtocolError: unsigned, wrongly signed, replayed or malformed.
        """
        signed = frame[:1] == bytes([_MARK])
        if self._key is None:
            if signed:
                raise ProtocolError(
                    "the peer signs its frames and this instance has no secret (setting secret)"
                )
            return msg.decode(frame)
        if not signed or len(frame) < _OVERHEAD:
            raise ProtocolError("the frame is not signed; the peer has no secret (setting secret)")
        header, payload = frame[: _HEADER.size], frame[_OVERHEAD:]
        if not hmac.compare_digest(frame[_HEADER.size : _OVERHEAD], self._mac(header, payload)):
            raise ProtocolError(
                "the frame's signature is wrong; the peer has another secret (setting secret)"
            )
        _, session_id, sequence, milliseconds = _HEADER.unpack(header)
        skew = abs(now - milliseconds / 1000)
        if skew > MAX_SKEW:
            raise ProtocolError(
                f"the frame is {skew:.0f} s away from this machine's clock, at most {MAX_SKEW:.0f} s are accepted: "
                "a replay, or the clocks are not synchronised"
            )
        self._purge(now)
        session = self._sessions.setdefault(session_id, _Session())
        session.heard = now
        if not session.accept(sequence):
            raise ProtocolError("the frame was received before: a replay")
        return msg.decode(payload)

    def _mac(self, header: bytes, payload: bytes) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, header + payload, "sha256")

    def _purge(self, now: float) -> None:
        # Whatever such a session sent is refused for its time stamp by now.
        if now >= self._purge_at:
            self._purge_at = now + MAX_SKEW
            self._sessions = {
                key: value for key, value in self._sessions.items() if now - value.heard <= 2 * MAX_SKEW
            }
