"""P's half of a manager, with a channel that has neither thread nor socket: what waits for `max_packed_bytes`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.errors import PDError
from sgl_pd_connector.transfer import prefill
from sgl_pd_connector.transfer.bad_frames import BadFrames
from sgl_pd_connector.transfer.budget import ByteBudget
from sgl_pd_connector.transfer.offers import Action, Offer, OfferTable, PackedChunk, Release
from sgl_pd_connector.transfer.plan import ChunkPlanner
from sgl_pd_connector.transfer.prefill import PrefillSide
from sgl_pd_connector.transfer.sender import JaxTransferKVSender
from sgl_pd_connector.transfer.stats import Recorder, TransferStats
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.layout import KVLayout
from sgl_pd_connector.wire.rooms import RoomKey
from tests.unit.transfer.fakes import FakeTransport

pytestmark = pytest.mark.unit

LAYOUT = KVLayout(num_layers=4, page_size=16, dtype="bfloat16", page_shape=(16, 2), sharding=(1, 1))
PROMPT = 2 * LAYOUT.page_size


class DirectChannel:
    """Tells the table at once."""

    num_offers = registered_bytes = 0

    def __init__(self, table: OfferTable, *, budget: ByteBudget, **_: Any) -> None:
        self.bad_frames = BadFrames("no side channel")
        self._table = table
        self._budget = budget

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Release):
                self._budget.give(action.packed_bytes)

    def add(self, offer: Offer) -> bool:
        self._table.add(offer, time.monotonic())
        return True

    def packed(self, offer: Offer, packed: Sequence[PackedChunk], packed_bytes: int) -> None:
        self._table.packed(offer, packed, packed_bytes, time.monotonic())

    def abort(self, offer: Offer, reason: str) -> None:
        self._do(self._table.abort(offer, reason, time.monotonic()))

    def fail(self, offer: Offer, error: PDError) -> None:
        raise AssertionError(error)


class Runner:
    def get_pools(self) -> list[jax.Array]:
        return []

    def set_pools(self, pools: list[jax.Array]) -> None:
        raise AssertionError("P writes nothing")


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> PrefillSide:
    """Room for one prompt."""
    monkeypatch.setattr(prefill, "PrefillChannel", DirectChannel)
    monkeypatch.setattr(prefill.ops, "warmup", lambda *_, **__: None)
    monkeypatch.setattr(prefill.ops, "gather", lambda *_: [])
    side = PrefillSide(
        ChunkPlanner(LAYOUT, chunk_bytes=4096, max_chunk_pages=8),
        transport=FakeTransport(),
        config=ConnectorConfig(max_packed_bytes=2 * LAYOUT.page_bytes),
        address=Address.of("127.0.0.1", 0, setting="host"),
        epoch=1,
        secret=None,
        recorder=Recorder(),
    )
    side.start(Runner())
    return side


def senders(side: PrefillSide, count: int) -> list[JaxTransferKVSender]:
    return [side.create_sender(RoomKey(room, b"prompt"), PROMPT) for room in range(count)]


def waiting_sends(side: PrefillSide) -> int:
    stats = TransferStats()
    side.fill(stats)
    return stats.waiting_sends


def test_what_the_engine_has_handed_over_is_marked_whether_there_is_room_or_not(side: PrefillSide) -> None:
    first, second, third = senders(side, 3)
    assert first.send([0, 1])
    assert not second.send([2, 3])
    assert [sender.offer.sent for sender in (first, second, third)] == [True, True, False]
    with pytest.raises(ValueError, match="twice"):
        second.send([2, 3])


def test_a_wrong_number_of_pages_hands_nothing_over(side: PrefillSide) -> None:
    [sender] = senders(side, 1)
    with pytest.raises(ValueError, match="3 pages given"):
        sender.send([0, 1, 2])
    assert not sender.offer.sent
    assert sender.send([0, 1])


def test_prompts_that_were_given_up_do_not_count_as_waiting(side: PrefillSide) -> None:
    first, head, *behind = senders(side, 5)
    for sender in (first, head, *behind):
        sender.send([0, 1])
    assert waiting_sends(side) == 4
    for sender in behind:
        sender.abort("client gone")
    assert waiting_sends(side) == 1
    head.abort("client gone")
    assert waiting_sends(side) == 0


def test_what_a_d_has_asked_for_is_copied_before_what_none_has(side: PrefillSide) -> None:
    first, unasked, asked, later = senders(side, 4)
    for sender in (first, unasked, asked, later):
        sender.send([0, 1])
    asked.offer.attempt = 1
    asked.offer.life.advance(KVPoll.WaitingForInput, time.monotonic())
    first.abort("over")
    side.step()
    assert [sender.released for sender in (unasked, asked, later)] == [False, True, False]
    assert waiting_sends(side) == 2
