"""The decode half of a manager: asks through the channel, pulls on the pull thread, writes on the engine's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import jax

from sgl_pd_connector import ops
from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.budget import ByteBudget
from sgl_pd_connector.transfer.decode_channel import DecodeChannel, RouteLookup
from sgl_pd_connector.transfer.interest import Interest, new_attempt
from sgl_pd_connector.transfer.interests import InterestTable, Timeouts
from sgl_pd_connector.transfer.known_routes import KnownRoutes
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.plan import ChunkPlanner, PullChunk, plan_pull
from sgl_pd_connector.transfer.pool import KVRunner, PoolWriter
from sgl_pd_connector.transfer.pull_executor import PullExecutor
from sgl_pd_connector.transfer.pull_task import PullTask, Retry
from sgl_pd_connector.transfer.receiver import JaxTransferKVReceiver
from sgl_pd_connector.transfer.stats import Recorder, TransferRecord, TransferStats
from sgl_pd_connector.transfer.transport import Transport
from sgl_pd_connector.wire.frames import FrameCodec
from sgl_pd_connector.wire.rooms import RoomKey


class DecodeSide:
    """Everything of a manager that only a decode instance has.

    `receive` and `step` belong to the engine's thread; the channel's and the pull executor's threads do the rest.
    """

    def __init__(
        self,
        planner: ChunkPlanner,
        *,
        transport: Transport,
        config: ConnectorConfig,
        look_up: RouteLookup,
        secret: str | None,
        recorder: Recorder,
    ) -> None:
        self.layout = planner.layout
        self._planner = planner
        self._recorder = recorder
        self._budget = ByteBudget(config.max_pulled_bytes)
        self._writer = PoolWriter()
        self._runner: KVRunner | None = None
        self._specs: dict[int, tuple[jax.ShapeDtypeStruct, ...]] = {}
        self.pull_executor = PullExecutor(
            transport, self._writer, self._budget, orphan_timeout=config.transfer_timeout
        )
        table = InterestTable(
            timeouts=Timeouts(
                config.bootstrap_timeout, config.peer_timeout, config.prefill_timeout, config.transfer_timeout
            ),
            instance_id=config.instance_id,
            layout_digest=planner.layout.digest,
            check=lambda interest, ready: planner.check(ready, interest.num_tokens),
            ended=self._record,
        )
        self.channel = DecodeChannel(
            table,
            codec=FrameCodec(secret),
            look_up=look_up,
            known=KnownRoutes(config.heartbeat_ttl),
            peer_timeout=config.peer_timeout,
        )

    def start(self, runner: KVRunner) -> None:
        """Compiles every scatter there will be."""
        self._runner = runner
        pools = runner.get_pools()
        groups = self._planner.groups_by_size
        ops.warmup(pools, groups, ops=("scatter",))
        self._specs = {size: ops.packed_specs(pools, size, groups[size]) for size in groups}

    def add(self, receiver: JaxTransferKVReceiver) -> None:
        if not self.channel.add(receiver.interest):
            error = reasons.given_up(receiver.bootstrap_room, "", "this decode instance is stopping")
            receiver.interest.life.fail(error, time.monotonic())

    def refuse(self, key: RoomKey, bootstrap_addr: str, reason: str) -> None:
        """Nobody will ask for anything in a room: P is told."""
        life = Lifecycle(time.monotonic())
        life.fail(reasons.given_up(key.room, "", reason), time.monotonic())
        interest = Interest(key, None, bootstrap_addr, new_attempt(), life, whole_room=True)
        self.channel.refused(interest)

    def receive(self, interest: Interest, page_ids: Sequence[int], skip_pages: int) -> None:
        """Starts the pull of an interest that is READY."""
        if interest.life.is_final:
            return
        first, page_ids = interest.ready, tuple(page_ids)
        assert first is not None, "receive() comes after KVPoll.WaitingForInput"
        assert interest.source is not None
        chunks = plan_pull(first, page_ids, skip_pages)
        if not interest.life.advance(KVPoll.Transferring, time.monotonic()):
            return
        interest.nbytes = sum(chunk.pages for chunk in chunks) * self.layout.page_bytes
        interest.pages = len(page_ids)

        def offered_again() -> Sequence[PullChunk] | None:
            # Set by the channel's thread.
            latest = interest.ready
            return None if latest is None or latest is first else plan_pull(latest, page_ids, skip_pages)

        task = PullTask(
            room=interest.key.room,
            life=interest.life,
            peer=interest.source.peer,
            chunks=chunks,
            specs=[self._specs[chunk.pages] for chunk in chunks],
            nbytes=[chunk.pages * self.layout.page_bytes for chunk in chunks],
            pulled=partial(self._arrived, interest),
            retry=Retry(partial(self.channel.offer_again, interest), offered_again),
        )
        self.pull_executor.submit(task).add_done_callback(partial(self._pulled, interest))

    @staticmethod
    def _arrived(interest: Interest) -> None:
        interest.pulled_at = time.monotonic()

    def _pulled(self, interest: Interest, _: Future[None]) -> None:
        self.ended(interest)

    def ended(self, interest: Interest) -> None:
        """The life is over: P is told."""
        self.channel.over(interest)

    def step(self) -> None:
        """Writes what has arrived."""
        if self._runner is not None:
            self._writer.run(self._runner)

    def fill(self, stats: TransferStats) -> None:
        """Sets the gauges of this half."""
        stats.in_flight = self.channel.num_interests
        stats.pulled_bytes = self._budget.held
        stats.bad_frames = self.channel.bad_frames.count

    def close(self) -> None:
        """Aborts what is in flight, tells P, ends the threads."""
        self.channel.close()
        self.pull_executor.close()

    def _record(self, interest: Interest) -> None:
        """By the channel's thread, once per interest that is over."""
        self._recorder.add(
            TransferRecord.of(
                role="decode",
                room=interest.key.room,
                entered=interest.life.entered,
                error=interest.life.error,
                num_tokens=interest.ready.num_tokens if interest.ready else interest.num_tokens or 0,
                pages=interest.pages,
                nbytes=interest.nbytes,
                retries=interest.retries,
                pulled_at=interest.pulled_at,
            )
        )
