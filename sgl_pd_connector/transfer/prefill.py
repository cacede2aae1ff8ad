"""The prefill half of a manager: gathers on the engine's thread, offers through the channel's."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from sgl_pd_connector import ops
from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.budget import ByteBudget
from sgl_pd_connector.transfer.engine import new_uuid
from sgl_pd_connector.transfer.offers import Offer, OfferTable, PackedChunk, Timeouts
from sgl_pd_connector.transfer.plan import ChunkPlanner
from sgl_pd_connector.transfer.pool import KVRunner
from sgl_pd_connector.transfer.prefill_channel import PrefillChannel
from sgl_pd_connector.transfer.sender import JaxTransferKVSender
from sgl_pd_connector.transfer.stats import Recorder, TransferRecord, TransferStats
from sgl_pd_connector.transfer.transport import Transport
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.frames import FrameCodec
from sgl_pd_connector.wire.rooms import RoomKey


class PrefillSide:
    """Everything of a manager that only a prefill instance has.

    `create_sender`, `send`, `abort` and `step` belong to the engine's thread; the channel's thread owns the offers.
    """

    def __init__(
        self,
        planner: ChunkPlanner,
        *,
        transport: Transport,
        config: ConnectorConfig,
        address: Address,
        epoch: int,
        secret: str | None,
        recorder: Recorder,
    ) -> None:
        self._planner = planner
        self._recorder = recorder
        self._budget = ByteBudget(config.max_packed_bytes)
        self._runner: KVRunner | None = None
        # Prompts whose pages wait for room in the budget. Replaced, and added to, on the engine's thread only.
        self._waiting: list[tuple[JaxTransferKVSender, np.ndarray]] = []
        table = OfferTable(
            timeouts=Timeouts(config.lease, config.prefill_timeout, config.transfer_timeout),
            epoch=epoch,
            layout_digest=planner.layout.digest,
            ready=self._ready,
            new_uuid=new_uuid,
            ended=self._record,
        )
        self.channel = PrefillChannel(
            table,
            transport=transport,
            budget=self._budget,
            codec=FrameCodec(secret),
            address=address,
            peer_timeout=config.peer_timeout,
            # Later than any deadline of the table, which takes offers back itself.
            offer_lifetime=config.lease + config.prefill_timeout + config.transfer_timeout,
        )

    def start(self, runner: KVRunner) -> None:
        """Compiles every gather there will be."""
        self._runner = runner
        ops.warmup(runner.get_pools(), self._planner.groups_by_size, ops=("gather",))

    def create_sender(self, key: RoomKey, num_tokens: int) -> JaxTransferKVSender:
        sender = JaxTransferKVSender(self, key, num_tokens)
        if not self.channel.add(sender.offer):
            error = reasons.given_up(key.room, "", "this prefill instance is stopping")
            sender.offer.life.fail(error, time.monotonic())
        return sender

    def send(self, sender: JaxTransferKVSender, page_ids: Sequence[int]) -> bool:
        """Gathers now if the budget allows, else in a later step."""
        expected = self._planner.layout.pages(sender.offer.num_tokens)
        if len(page_ids) != expected:
            raise ValueError(
                f"room {sender.offer.key.room}: {len(page_ids)} pages given for {sender.offer.num_tokens} tokens, "
                f"which have {expected}"
            )
        sender.offer.sent_at = time.monotonic()
        if sender.offer.life.is_final:
            return True
        self._waiting.append((sender, np.asarray(page_ids, np.int32)))
        self.step()
        return sender.released

    def step(self) -> None:
        """Gathers what waited, as far as the budget goes: what a D has asked for before what none has, each in order.

        Prompts whose D is dead would otherwise keep those of all the others waiting.
        """
        if not self._waiting:
            return
        live = [(sender, ids) for sender, ids in self._waiting if not sender.offer.life.is_final]
        live.sort(key=lambda each: each[0].offer.attempt is None)
        gathered = 0
        for sender, page_ids in live:
            nbytes = len(page_ids) * self._planner.layout.page_bytes
            if not self._budget.take(nbytes):
                break
            self._gather(sender, page_ids, nbytes)
            gathered += 1
        self._waiting = live[gathered:]

    def _gather(self, sender: JaxTransferKVSender, page_ids: np.ndarray, nbytes: int) -> None:
        assert self._runner is not None, "register_runner() was not called"
        try:
            pools = self._runner.get_pools()
            packed = [
                PackedChunk(
                    chunk,
                    ops.gather(
                        pools,
                        page_ids[chunk.first : chunk.first + chunk.pages],
                        self._planner.groups(chunk.pages),
                    ),
                )
                for chunk in self._planner.chunks(len(page_ids))
            ]
        except Exception as error:  # noqa: BLE001 - whatever the device says, it is this one request's failure
            self._budget.give(nbytes)
            offer = sender.offer
            self.channel.fail(offer, reasons.not_copied(offer.key.room, offer.peer_name, error))
            return
        sender.mark_gathered()
        self.channel.packed(sender.offer, packed, nbytes)

    def abort(self, offer: Offer, reason: str) -> None:
        self.channel.abort(offer, reason)

    def fill(self, stats: TransferStats) -> None:
        """Sets the gauges of this half."""
        stats.in_flight = self.channel.num_offers
        stats.packed_bytes = self._budget.held
        stats.registered_bytes = self.channel.registered_bytes
        # By any thread: a copy is one step. Those given up are in it until the next step.
        stats.waiting_sends = sum(not sender.offer.life.is_final for sender, _ in list(self._waiting))
        stats.bad_frames = self.channel.bad_frames.count

    def close(self) -> None:
        self._waiting.clear()
        self.channel.close()

    def _ready(self, offer: Offer, uuids: Sequence[int]) -> msg.Ready:
        assert offer.attempt is not None
        assert offer.packed is not None
        chunks = [packed.chunk for packed in offer.packed]
        ready = self._planner.ready(offer.key.room, offer.attempt, offer.num_tokens, chunks, uuids)
        return ready.model_copy(update={"again": offer.again}) if offer.again else ready

    def _record(self, offer: Offer) -> None:
        """By the channel's thread, once per offer that is over."""
        self._recorder.add(
            TransferRecord.of(
                role="prefill",
                room=offer.key.room,
                entered=offer.life.entered,
                error=offer.life.error,
                num_tokens=offer.num_tokens,
                pages=self._planner.layout.pages(offer.num_tokens),
                nbytes=offer.packed_bytes,
                retries=offer.retries,
            )
        )
