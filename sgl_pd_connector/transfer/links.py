"""D's connections to prefill instances. The pull thread owns them; nothing here is locked."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass

from sgl_pd_connector.transfer.transport import Link, Peer, Transport

logger = logging.getLogger(__name__)

LINK_IDLE = 120.0
"""Seconds after which an unused connection is given up. Its peer may be gone for good, and on the way there may be
firewalls that forget connections in silence: the first transfer after that would wait for its deadline."""


@dataclass(eq=False)
class _Line:
    peer: Peer
    link: Link
    used: float


class Links:
    """One connection per prefill instance in use, and those on their way out.

    A connection on which something went wrong is *retired*: new pulls get another. The transfers that still use it may
    well end in success, so it is cut after the last of them.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._current: dict[Peer, _Line] = {}
        self._retired: list[_Line] = []

    def get(self, peer: Peer, now: float) -> Link:
        """The connection for a new transfer."""
        line = self._current.get(peer)
        if line is None:
            # Whoever was there before at that address, or under that name, is gone.
            for other in list(self._current):
                if other.instance_id == peer.instance_id or other.transfer_addr == peer.transfer_addr:
                    self.retire(other, self._current[other].link)
            line = self._current[peer] = _Line(peer, self._transport.link(peer), now)
        line.used = now
        return line.link

    def retire(self, peer: Peer, link: Link) -> None:
        """After an error on it. Harmless when it was retired before."""
        line = self._current.get(peer)
        if line is not None and line.link is link:
            logger.info(
                "giving up the connection to prefill instance %s at %s", peer.instance_id, peer.transfer_addr
            )
            self._retired.append(self._current.pop(peer))
            link.retire()

    def retire_idle(self, busy: Set[Link], now: float) -> None:
        """Gives up what nobody used for long or what the peer has left, links in ``busy`` excepted."""
        for line in list(self._current.values()):
            if line.link in busy:
                line.used = now
            elif now - line.used > LINK_IDLE or not line.link.is_whole():
                self.retire(line.peer, line.link)

    def retire_all(self) -> None:
        for line in list(self._current.values()):
            self.retire(line.peer, line.link)

    def cut_unused(self, busy: Set[Link]) -> list[Link]:
        """Cuts the retired links that no transfer uses, and returns them: what was under way on them is lost.

        Args:
            busy: links that transfers use.
        """
        unused = [line for line in self._retired if line.link not in busy]
        self._retired = [line for line in self._retired if line.link in busy]
        for line in unused:
            try:
                line.link.cut()
            except Exception:
                logger.exception("cutting the connection to %s failed", line.peer.transfer_addr)
        return [line.link for line in unused]
