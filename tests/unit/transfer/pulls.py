"""A `PullExecutor` whose peers and engine are a test's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import TransferAbortedError, TransferTimeoutError
from sgl_pd_connector.transfer.budget import ByteBudget
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.plan import PullChunk
from sgl_pd_connector.transfer.pull_executor import PullExecutor
from sgl_pd_connector.transfer.pull_task import PullTask, Retry
from sgl_pd_connector.transfer.transport import Peer
from tests.unit.transfer.fakes import FakeTransport, FakeWriter

P1 = Peer("prefill-1", 1, "10.0.0.1:1")
P2 = Peer("prefill-2", 2, "10.0.0.2:1")
SIZE = 10  # bytes of a chunk
GONE = TransferAbortedError("client gone")
LATE = TransferTimeoutError("too late")


class Pulls:
    """An executor between a fake transport and a fake writer."""

    def __init__(self, limit: int = 1000, orphan_timeout: float = 3600.0) -> None:
        self.transport = FakeTransport()
        self.writer = FakeWriter()
        self.budget = ByteBudget(limit)
        self.executor = PullExecutor(
            self.transport,
            self.writer,
            self.budget,
            orphan_timeout=orphan_timeout,  # type: ignore[arg-type]
        )
        self._uuids = itertools.count(1_000_000)

    def task(
        self,
        *uuids: int,
        peer: Peer = P1,
        nbytes: int = SIZE,
        pulled: Any = lambda: None,
        retry: Retry | None = None,
    ) -> PullTask:
        life = Lifecycle(0.0)
        life.advance(KVPoll.WaitingForInput, 0.0)
        life.advance(KVPoll.Transferring, 0.0)
        chunks = [PullChunk(uuid, 1, np.array([uuid], np.int32), 0) for uuid in uuids]
        specs: Any = [("layer group 1", "layer group 2")] * len(uuids)
        return PullTask(7, life, peer, chunks, specs, [nbytes] * len(uuids), retry, pulled)

    def start(self, *uuids: int, **options: Any) -> tuple[PullTask, Future[None]]:
        task = self.task(*uuids, **options)
        return task, self.executor.submit(task)

    def let_it_run(self) -> None:
        """Returns when the pull thread has looked at everything at least once more: it serves transfers in turn."""
        for _ in range(2):
            _, future = self.start()  # without chunks it is done when it is looked at
            future.result(20)

    def finish(self, future: Future[None], uuids: Sequence[int]) -> None:
        for uuid in uuids:
            self.transport.arrive(uuid)
            self.writer.write_all(1)
        future.result(20)

    def move(self, uuid: int, **options: Any) -> None:
        """A transfer of one chunk, from its start to its end."""
        _, future = self.start(uuid, **options)
        self.finish(future, [uuid])
