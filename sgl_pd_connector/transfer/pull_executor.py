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
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import PDError, TransferTimeoutError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.budget import Admission, ByteBudget
from sgl_pd_connector.transfer.links import Links
from sgl_pd_connector.transfer.pool import PoolWrite, PoolWriter
from sgl_pd_connector.transfer.pull_task import Job, Orphan, Piece, PullTask
from sgl_pd_connector.transfer.transport import Link, Peer, Transport

logger = logging.getLogger(__name__)

WINDOW = 4
"""Chunks of one transfer in flight at once: enough to overlap the pull of one with the write of another."""

SHORTEST_NAP = 0.0001
LONGEST_NAP = 0.001
LONGER_NAP = 1.25
"""By how much one grows while nothing happens: what becomes ready is seen a quarter of its time too late at most."""

DRAIN = 0.5
"""Seconds after a connection broke for which chunks under way on it are waited for, before all are pulled anew: some of
its sockets may stand, and what was to come over them never does."""

AFTER_ERROR = 1.0
"""Seconds of rest after an error that nobody foresaw: one that comes back at once is not to fill the log."""

IDLE_CHECK = 5.0
"""Seconds between looks for connections that nobody uses or whose peer is gone."""

STOP_GRACE = 0.5
"""Seconds that arrays still arriving are given when this side stops."""


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
        self._admission = Admission(budget)
        self._orphan_timeout = orphan_timeout
        self._submitted: deque[Job] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._jobs: list[Job] = []
        self._orphans: list[Orphan] = []
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
        job = Job(task, Future())
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
            try:
                progress = self._look_at_everything()
            except Exception:
                # All transfers of this process depend on this thread.
                logger.exception("pulling: unexpected error; going on")
                self._wake.wait(AFTER_ERROR)
                continue
            nap = SHORTEST_NAP if progress else min(LONGER_NAP * nap, LONGEST_NAP)
            if self._jobs or self._orphans:
                self._wake.wait(nap)
        self._stop()

    def _look_at_everything(self) -> bool:
        """True if anything could be done."""
        while self._submitted:
            self._jobs.append(self._submitted.popleft())
        progress = False
        for job in self._jobs:
            progress |= self._guarded_advance(job)
        self._jobs = [job for job in self._jobs if not job.future.done()]
        progress |= self._drain_orphans()
        self._tend_links()
        return progress

    def _guarded_advance(self, job: Job) -> bool:
        try:
            return self._advance(job)
        except Exception as error:
            # One transfer's surprise must not end the others.
            failure = reasons.pull_failed(job.task.room, job.task.who, error)
            logger.exception("%s", failure)
            self._fail(job, failure)
            self._retire(job.task.peer, job.link)
            return True

    def _advance(self, job: Job) -> bool:
        """Does whatever can be done for one transfer without waiting. True if anything was."""
        if job.task.life.is_final:
            self._abandon(job)
            return True
        progress = False
        for step in (self._pull, self._take_arrived, self._take_written):
            progress |= step(job)
            if job.future.done():
                return True
        if job.all_pulled and not job.writing:
            self._succeed(job)
            return True
        return progress

    def _pull(self, job: Job) -> bool:
        if job.broken is not None:
            now = time.monotonic()
            if now - job.broken_at > DRAIN:
                self._leave_behind(job, now)
            failure = job.recover(now)
            if failure is not None:
                self._fail(job, failure)
        return job.broken is None and self._start_pulls(job)

    def _start_pulls(self, job: Job) -> bool:
        task, started = job.task, False
        if job.link is None and job.todo:
            job.link = self._links.get(task.peer, time.monotonic())
        while job.todo and len(job.pulling) < WINDOW:
            index = job.todo[0]
            holds = bool(job.pulling or job.writing)
            if not self._admission.take(job, task.nbytes[index], time.monotonic(), holds=holds):
                break
            piece = Piece(index, job.chunks[index], task.nbytes[index])
            job.todo.popleft()
            job.pulling.append(piece)
            assert job.link is not None
            piece.arrays = job.link.pull(piece.chunk.uuid, task.specs[index])
            started = True
        return started

    def _take_arrived(self, job: Job) -> bool:
        task, progress = job.task, False
        # In any order: a connection that broke may leave the first hanging and fail the second.
        for piece in [piece for piece in job.pulling if _all_ready(piece.arrays)]:
            progress = True
            error = _error_in(piece.arrays)
            is_last = not job.todo and len(job.pulling) == 1
            if error is None and is_last and not _whole(job.link):
                error = "a connection broke while data was arriving on it"
            job.pulling.remove(piece)
            if error is not None:
                self._budget.give(piece.nbytes)
                job.todo.appendleft(piece.index)
                if not self._may_pull_again(job, error):
                    return True
                continue
            job.writing.append(piece)
            piece.write = PoolWrite(task.life, piece.arrays, piece.chunk.page_ids, piece.chunk.skip)
            self._writer.put(piece.write)
            if job.all_pulled:
                task.pulled()
        return progress

    def _may_pull_again(self, job: Job, error: str) -> bool:
        """After an error in a pull. False: the transfer has ended with it."""
        task = job.task
        self._retire(task.peer, job.link)
        first = job.broken is None
        retry = job.may_retry(error, time.monotonic())
        if first:
            failure = reasons.pull_failed(task.room, task.who, error)
            if retry:
                logger.warning("%s; asking it to offer the prompt again", failure)
            else:
                self._fail(job, failure)
        return retry

    def _take_written(self, job: Job) -> bool:
        progress = False
        while job.writing and (write := job.writing[0].write) is not None and _is_over(write):
            progress = True
            problem = write.error or _error_in([write.token])
            if problem is not None:
                self._fail(job, reasons.write_failed(job.task.room, job.task.who, problem))
                return True
            self._budget.give(job.writing.popleft().nbytes)
        return progress

    def _succeed(self, job: Job) -> None:
        if not job.task.life.advance(KVPoll.Success, time.monotonic()):
            self._abandon(job)
            return
        job.future.set_result(None)

    def _fail(self, job: Job, error: PDError) -> None:
        job.task.life.fail(error, time.monotonic())
        self._abandon(job)

    def _abandon(self, job: Job) -> None:
        """The life has ended in failure: lets go of everything and ends the future."""
        if job.future.done():
            return
        error = job.task.life.failure_exception()
        self._admission.leave(job)
        pieces = [*job.pulling, *job.writing]
        job.pulling.clear()
        job.writing.clear()
        # A peer that did not deliver in time is not waited for again.
        patience = 0.0 if isinstance(error, TransferTimeoutError) else self._orphan_timeout
        give_up = time.monotonic() + patience
        for piece in pieces:
            self._orphan(job, piece, give_up)
        job.future.set_exception(error)

    def _leave_behind(self, job: Job, now: float) -> None:
        """What a broken connection still owes may never come, and it goes when the last transfer has left it."""
        while job.pulling:
            self._orphan(job, job.pulling.popleft(), give_up=now)

    def _orphan(self, job: Job, piece: Piece, give_up: float) -> None:
        if job.link is None or not piece.arrays or _all_ready(piece.arrays):
            self._budget.give(piece.nbytes)
        else:
            self._orphans.append(Orphan(job.task.peer, job.link, piece.arrays, piece.nbytes, give_up))

    def _retire(self, peer: Peer, link: Link | None) -> None:
        if link is not None:
            self._links.retire(peer, link)

    def _tend_links(self) -> None:
        now = time.monotonic()
        busy = {job.link for job in self._jobs if job.link is not None}
        busy |= {orphan.link for orphan in self._orphans if now < orphan.give_up}
        if now >= self._next_idle_check:
            self._next_idle_check = now + IDLE_CHECK
            self._links.retire_idle(busy, now)
        cut = self._links.cut_unused(busy)
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
        left: list[Orphan] = []
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


def _whole(link: Link | None) -> bool:
    """Whether what came over it can be trusted."""
    return link is not None and link.is_whole()


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
