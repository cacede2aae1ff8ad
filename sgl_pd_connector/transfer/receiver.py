"""`JaxTransferKVReceiver`: the decode side of one request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sgl_pd_connector.base import BaseKVReceiver, KVPoll
from sgl_pd_connector.errors import PDError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.interest import Interest, new_attempt
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.wire.rooms import RoomKey

if TYPE_CHECKING:
    from sgl_pd_connector.transfer.decode import DecodeSide
    from sgl_pd_connector.transfer.manager import JaxTransferKVManager


class JaxTransferKVReceiver(BaseKVReceiver):
    """Made by `JaxTransferKVManager.create_receiver`; used on the engine's thread."""

    def __init__(
        self,
        mgr: JaxTransferKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        *,
        side: DecodeSide,
        prompt: bytes,
        num_tokens: int | None,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self._side = side
        self.interest = Interest(
            key=RoomKey(bootstrap_room, prompt),
            num_tokens=num_tokens,
            bootstrap_addr=bootstrap_addr,
            attempt=new_attempt(),
            life=Lifecycle(time.monotonic()),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, as P has it. From `KVPoll.WaitingForInput` on."""
        assert self.interest.ready is not None, "P is not ready"
        return self.interest.ready.num_tokens

    @property
    def num_pages(self) -> int:
        """Pages of the prompt, the partial last one included. From `KVPoll.WaitingForInput` on."""
        return self._side.layout.pages(self.num_tokens)

    def receive(self, kv_indices: Sequence[int], skip_pages: int = 0) -> None:
        """See `BaseKVReceiver.receive`. Harmless if the transfer has failed meanwhile.

        Raises:
            ValueError: the number of pages is not that of the prompt.
        """
        self._side.receive(self.interest, kv_indices, skip_pages)

    def poll(self) -> KVPoll:
        return self.interest.life.state

    def abort(self, reason: str) -> None:
        # Until P is ready the channel's thread alone knows who is asked.
        who = str(self.interest.source or "")
        if self.interest.life.fail(reasons.given_up(self.bootstrap_room, who, reason), time.monotonic()):
            self._side.ended(self.interest)

    def failure_exception(self) -> PDError:
        return self.interest.life.failure_exception()
