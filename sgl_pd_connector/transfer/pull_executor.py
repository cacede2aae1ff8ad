"""`PullExecutor`: pull -> always wait until ready -> write -> done.

One thread serves all pulls by looking at them in turn; it never waits for a single one. So a stalled peer holds up
nobody else, there is no pool of threads to run out of, and it makes no difference whether one or a thousand transfers
are in flight. A future is done when data is pulled AND ready AND written, never earlier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import PDError, TransferTimeoutError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.budget import ByteBudget
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.links import Links
from sgl_pd_connector.transfer.plan import PullChunk
from sgl_pd_connector.transfer.pool import PoolWrite, PoolWriter
from sgl_pd_connector.transfer.transport import Link, Peer, Transport

logger = logging.getLogger(__name__)

WINDOW = 4
"""Chunks of one transfer in flight at once: enough to overlap the pull of one with the write of another."""

SHORTEST_NAP = 0.0001
LONGEST_NAP = 0.001

IDLE_CHECK = 30.0
"""Seconds between looks for connections that nobody uses."""

STOP_GRACE = 0.5
"""Seconds that arrays still arriving are given when this side stops."""


@dataclass(frozen=True)
class PullTask:
    """What to pull: chunks of one prompt from one peer, each with the specs of its buffers."""

    room: int
    life: Lifecycle
    peer: Peer
    chunks: Sequence[PullChunk]
    specs: Sequence[Sequence[jax.ShapeDtypeStruct]]
    nbytes: Sequence[int]
    pulled: Callable[[], None] = lambda: None
    """Called on the pull thread when all data has arrived and before it is written."""

    @property
    def who(self) -> str:
        return reasons.prefill_instance(self.peer.instance_id, self.peer.transfer_addr)


@dataclass(eq=False)
class _Piece:
    """A chunk in flight: being pulled, then being written."""

    chunk: PullChunk
    arrays: list[jax.Array]
    nbytes: int
    write: PoolWrite | None = None


@dataclass(eq=False)
class _Job:
    task: PullTask
    future: Future[None]
    link: Link | None = None
    next_chunk: int = 0
    pulling: deque[_Piece] = field(default_factory=deque)
    writing: deque[_Piece] = field(default_factory=deque)


@dataclass(eq=False)
class _Orphan:
    """Arrays of a transfer that is over. Dropping them while they arrive is not safe, so they are kept until ready."""

    peer: Peer
    link: Link
    arrays: list[jax.Array]
    nbytes: int
    give_up: float


class PullExecutor:
    """Owner of the pull thread, which alone talks to the transport's links."""

    def __init__(
        self, transport: Transport, writer: PoolWriter, budget: ByteBudget, *, orphan_timeout: float
    ) -> None:
        """
        Args:
            transport: where links come from.
            writer: takes chunks that are ready; the engine's thread writes them.
            budget: bytes pulled and not yet written.
            orphan_timeout: how long arrays of an aborted transfer are waited for before the link is dropped.
        """
        self._writer = writer
        self._budget = budget
        self._orphan_timeout = orphan_timeout
        self._submitted: deque[_Job] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._jobs: list[_Job] = []
        self._orphans: list[_Orphan] = []
        self._links = Links(transport)
        self._next_idle_check = 0.0
        self._thread = threading.Thread(target=self._run, name="sgl-pd-pull", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Transfers not finished, and leftovers of aborted ones."""
        return len(self._submitted) + len(self._jobs) + len(self._orphans)

    def submit(self, task: PullTask) -> Future[None]:
        """Starts a pull. Never blocks.

        The future ends with the life of the task: with None after `KVPoll.Success`, else with its error. Whoever ends
        the life from outside (an abort, a deadline) thereby ends the pull.
        """
        job = _Job(task, Future())
        self._submitted.append(job)
        self._wake.set()
        return job.future

    def close(self) -> None:
        """Aborts what is in flight and ends the thread."""
        if not self._stopping:
            self._stopping = True
            self._wake.set()
            self._thread.join()

    # The pull thread.

    def _run(self) -> None:
        nap = SHORTEST_NAP
        while not self._stopping:
            if not self._jobs and not self._orphans and not self._submitted:
                self._wake.wait(IDLE_CHECK)
            self._wake.clear()
            while self._submitted:
                self._jobs.append(self._submitted.popleft())
            progress = False
            for job in self._jobs:
                progress |= self._guarded_advance(job)
            self._jobs = [job for job in self._jobs if not job.future.done()]
            progress |= self._drain_orphans()
            self._tend_links()
            nap = SHORTEST_NAP if progress else min(2 * nap, LONGEST_NAP)
            if self._jobs or self._orphans:
                self._wake.wait(nap)
        self._stop()

    def _guarded_advance(self, job: _Job) -> bool:
        try:
            return self._advance(job)
        except Exception as error:
            # One transfer's surprise must not end the others.
            failure = reasons.pull_failed(job.task.room, job.task.who, error)
            logger.exception("%s", failure)
            self._retire(job.task.peer, job.link)
            self._fail(job, failure)
            return True

    def _advance(self, job: _Job) -> bool:
        """Does whatever can be done for one transfer without waiting. True if anything was."""
        task = job.task
        if task.life.is_final:
            self._abandon(job)
            return True
        progress = self._start_pulls(job)
        while job.pulling and _all_ready(job.pulling[0].arrays):
            piece = job.pulling.popleft()
            job.writing.append(piece)
            error = _error_in(piece.arrays)
            if error is not None:
                self._retire(task.peer, job.link)
                self._fail(job, reasons.pull_failed(task.room, task.who, error))
                return True
            piece.write = PoolWrite(task.life, piece.arrays, piece.chunk.page_ids, piece.chunk.skip)
            self._writer.put(piece.write)
            progress = True
            if not job.pulling and job.next_chunk == len(task.chunks):
                task.pulled()
        while job.writing and (write := job.writing[0].write) is not None and _is_over(write):
            problem = write.error or _error_in([write.token])
            if problem is not None:
                self._fail(job, reasons.write_failed(task.room, task.who, problem))
                return True
            self._budget.give(job.writing.popleft().nbytes)
            progress = True
        if (
            not job.pulling
            and not job.writing
            and job.next_chunk == len(task.chunks)
            and not job.future.done()
        ):
            if task.life.advance(KVPoll.Success, time.monotonic()):
                job.future.set_result(None)
                if job.link is not None:
                    self._links.succeeded(task.peer, job.link)
            else:
                self._abandon(job)
            return True
        return progress

    def _start_pulls(self, job: _Job) -> bool:
        task, started = job.task, False
        if job.link is None and task.chunks:
            job.link = self._links.get(task.peer, time.monotonic())
        while job.next_chunk < len(task.chunks) and len(job.pulling) < WINDOW:
            index = job.next_chunk
            if not self._budget.take(task.nbytes[index]):
                break
            job.next_chunk += 1
            chunk = task.chunks[index]
            piece = _Piece(chunk, [], task.nbytes[index])
            job.pulling.append(piece)
            assert job.link is not None
            piece.arrays = job.link.pull(chunk.uuid, task.specs[index])
            started = True
        return started

    def _fail(self, job: _Job, error: PDError) -> None:
        job.task.life.fail(error, time.monotonic())
        self._abandon(job)

    def _abandon(self, job: _Job) -> None:
        """The life has ended in failure: lets go of everything and ends the future."""
        if job.future.done():
            return
        error = job.task.life.failure_exception()
        pieces = [*job.pulling, *job.writing]
        job.pulling.clear()
        job.writing.clear()
        # A peer that did not deliver in time is not waited for again.
        patience = 0.0 if isinstance(error, TransferTimeoutError) else self._orphan_timeout
        give_up = time.monotonic() + patience
        for piece in pieces:
            if job.link is None or not piece.arrays or _all_ready(piece.arrays):
                self._budget.give(piece.nbytes)
            else:
                self._orphans.append(_Orphan(job.task.peer, job.link, piece.arrays, piece.nbytes, give_up))
        job.future.set_exception(error)

    def _retire(self, peer: Peer, link: Link | None) -> None:
        if link is not None:
            self._links.retire(peer, link)

    def _tend_links(self) -> None:
        now = time.monotonic()
        busy = {job.link for job in self._jobs if job.link is not None}
        busy |= {orphan.link for orphan in self._orphans if now < orphan.give_up}
        half_way = {orphan.link for orphan in self._orphans}
        if now >= self._next_idle_check:
            self._next_idle_check = now + IDLE_CHECK
            self._links.retire_idle(busy, now)
        cut = self._links.cut_unused(busy, half_way, now)
        if cut:
            # Their memory goes with the connection.
            for orphan in self._orphans:
                if orphan.link in cut:
                    self._budget.give(orphan.nbytes)
            self._orphans = [orphan for orphan in self._orphans if orphan.link not in cut]

    def _drain_orphans(self) -> bool:
        if not self._orphans:
            return False
        now = time.monotonic()
        left: list[_Orphan] = []
        for orphan in self._orphans:
            if _all_ready(orphan.arrays):
                self._budget.give(orphan.nbytes)
                continue
            left.append(orphan)
            if now >= orphan.give_up:
                self._retire(orphan.peer, orphan.link)
        changed = len(left) != len(self._orphans)
        self._orphans = left
        return changed

    def _stop(self) -> None:
        while self._submitted:
            self._jobs.append(self._submitted.popleft())
        for job in self._jobs:
            reason = "this decode instance is stopping"
            self._fail(job, reasons.given_up(job.task.room, job.task.who, reason))
        # Arrays still arriving when the process exits can crash it: give them a moment, then cut the links.
        deadline = time.monotonic() + STOP_GRACE
        while self._orphans and time.monotonic() < deadline:
            if not self._drain_orphans():
                time.sleep(LONGEST_NAP)
        for orphan in self._orphans:
            orphan.give_up = 0.0
        self._jobs.clear()
        self._links.retire_all()
        self._tend_links()


def _is_over(write: PoolWrite) -> bool:
    return write.error is not None or (write.token is not None and _all_ready([write.token]))


def _all_ready(arrays: Sequence[Any]) -> bool:
    # `jax.Array.is_ready` exists since long before the oldest version supported; its stubs do not know it.
    return all(array.is_ready() for array in arrays)


def _error_in(arrays: Sequence[Any]) -> str | None:
    """The failure hidden in arrays that say they are ready: each one raises by itself, and only when used."""
    for array in arrays:
        try:
            array.block_until_ready()
        except Exception as error:  # noqa: BLE001 - the native layer raises several kinds
            return str(error)
    return None
