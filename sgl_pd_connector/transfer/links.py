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
    made: float
    used: float
    cut: float = 0.0


class Links:
    """One connection per prefill instance in use, and those on their way out.

    A connection on which something went wrong is *retired*: new pulls get another. The transfers that still use it may
    well end in success, so it is cut after the last of them. Its native server is deleted then, but not while a pull
    is half-way: that would wait for the peer and, holding the GIL, freeze the process. Such a link is *stuck* until its
    peer has served another transfer; if it never does, sockets and threads stay until the process ends.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._current: dict[Peer, _Line] = {}
        self._retired: list[_Line] = []
        self._stuck: list[_Line] = []

    def get(self, peer: Peer, now: float) -> Link:
        """The connection for a new transfer."""
        line = self._current.get(peer)
        if line is None:
            # Whoever was there before at that address, or under that name, is gone.
            for other in list(self._current):
                if other.instance_id == peer.instance_id or other.transfer_addr == peer.transfer_addr:
                    self.retire(other, self._current[other].link)
            line = self._current[peer] = _Line(peer, self._transport.link(peer), now, now)
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

    def retire_idle(self, busy: Set[Link], now: float) -> None:
        """Gives up what nobody used for long, links in ``busy`` excepted."""
        for line in list(self._current.values()):
            if line.link in busy:
                line.used = now
            elif now - line.used > LINK_IDLE:
                self.retire(line.peer, line.link)

    def retire_all(self) -> None:
        for line in list(self._current.values()):
            self.retire(line.peer, line.link)

    def cut_unused(self, busy: Set[Link], half_way: Set[Link], now: float) -> list[Link]:
        """Cuts the retired links that no transfer uses, and returns them: what was under way on them is lost.

        Args:
            busy: links that transfers use.
            half_way: links on which arrays are still under way.
            now: the time.
        """
        unused = [line for line in self._retired if line.link not in busy]
        self._retired = [line for line in self._retired if line.link in busy]
        for line in unused:
            line.cut = now
            try:
                line.link.cut()
            except Exception:
                logger.exception("cutting the connection to %s failed", line.peer.transfer_addr)
            if line.link in half_way:
                self._stuck.append(line)
            else:
                self._close(line)
        return [line.link for line in unused]

    def succeeded(self, peer: Peer, link: Link) -> None:
        """A transfer over this link has ended well: what was stuck before it was made is so no longer."""
        line = self._current.get(peer)
        if line is None or line.link is not link:
            return
        for stuck in list(self._stuck):
            if stuck.peer == peer and stuck.cut < line.made:
                self._stuck.remove(stuck)
                self._close(stuck)

    def _close(self, line: _Line) -> None:
        try:
            line.link.close()
        except Exception:
            logger.exception("closing the connection to %s failed", line.peer.transfer_addr)
