"""`JaxTransferKVSender`: the prefill side of one request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sgl_pd_connector.base import BaseKVSender, KVPoll
from sgl_pd_connector.errors import PDError
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.offers import Offer
from sgl_pd_connector.wire.rooms import RoomKey

if TYPE_CHECKING:
    from sgl_pd_connector.transfer.prefill import PrefillSide


class JaxTransferKVSender(BaseKVSender):
    """Made by `JaxTransferKVManager.create_sender`; used on the engine's thread."""

    def __init__(self, side: PrefillSide, key: RoomKey, num_tokens: int) -> None:
        self._side = side
        self.offer = Offer(key, num_tokens, Lifecycle(time.monotonic()))
        self._gathered = False

    def send(self, kv_indices: Sequence[int]) -> bool:
        """See `BaseKVSender.send`.

        Raises:
            ValueError: the number of pages is not that of the prompt, or `send` was called before.
        """
        if self.offer.sent:
            raise ValueError(f"room {self.offer.key.room}: send() was called twice")
        return self._side.send(self, kv_indices)

    def mark_gathered(self) -> None:
        """By the prefill side: the pages are copied out."""
        self._gathered = True

    @property
    def released(self) -> bool:
        return self._gathered or self.offer.life.is_final

    def poll(self) -> KVPoll:
        return self.offer.life.state

    def abort(self, reason: str) -> None:
        self._side.abort(self.offer, reason)

    def failure_exception(self) -> PDError:
        return self.offer.life.failure_exception()
