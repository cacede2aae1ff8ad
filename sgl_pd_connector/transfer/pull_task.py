"""What the pull thread works on: a transfer, its chunks in flight, and what is left of transfers that are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import jax

from sgl_pd_connector.errors import PDError
from sgl_pd_connector.transfer import reasons
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.plan import PullChunk
from sgl_pd_connector.transfer.pool import PoolWrite
from sgl_pd_connector.transfer.transport import Link, Peer

OFFER_AGAIN_WITHIN = 2.0
"""Seconds from the failure of a pull until the chunks must have been offered again. A P that lives answers at once, and
is asked once more after a second; one that died with the connection keeps the request waiting for so long."""


@dataclass(frozen=True)
class Retry:
    """How to go on after a pull has failed and, with it, used up what P had offered.

    Attributes:
        ask: has P offer the same chunks again.
        answer: the chunks under their new uuids; None until P has answered.
    """

    ask: Callable[[], None]
    answer: Callable[[], Sequence[PullChunk] | None]


@dataclass(frozen=True)
class PullTask:
    """What to pull: chunks of one prompt from one peer, each with the specs of its buffers.

    Attributes:
        retry: None: the first error on the connection is the end.
        pulled: called on the pull thread when all data has arrived and before it is written.
    """

    room: int
    life: Lifecycle
    peer: Peer
    chunks: Sequence[PullChunk]
    specs: Sequence[Sequence[jax.ShapeDtypeStruct]]
    nbytes: Sequence[int]
    retry: Retry | None = None
    pulled: Callable[[], None] = lambda: None

    @property
    def who(self) -> str:
        return reasons.prefill_instance(self.peer.instance_id, self.peer.transfer_addr)


@dataclass(eq=False)
class Piece:
    """A chunk in flight: being pulled, then being written. ``index`` is its place in the task."""

    index: int
    chunk: PullChunk
    nbytes: int
    arrays: list[jax.Array] = field(default_factory=list)
    write: PoolWrite | None = None


@dataclass(eq=False)
class Job:
    """A task that is under way.

    Attributes:
        chunks: of the task, under the uuids of P's latest offer.
        todo: indices of chunks that are not being pulled.
        broken: why a pull failed, from then until P has offered the chunks again.
        broken_at: since when.
        asked: whether P was asked to; it is only once.
    """

    task: PullTask
    future: Future[None]
    link: Link | None = None
    chunks: Sequence[PullChunk] = ()
    todo: deque[int] = field(default_factory=deque)
    pulling: deque[Piece] = field(default_factory=deque)
    writing: deque[Piece] = field(default_factory=deque)
    broken: str | None = None
    broken_at: float = 0.0
    asked: bool = False

    def __post_init__(self) -> None:
        self.chunks = self.task.chunks
        self.todo.extend(range(len(self.chunks)))

    @property
    def all_pulled(self) -> bool:
        return not self.pulling and not self.todo

    def may_retry(self, problem: str, now: float) -> bool:
        """After an error in a pull: whether the chunk will be pulled again. True for all that break together."""
        if self.broken is None:
            if self.task.retry is None or self.asked:
                return False
            self.broken, self.broken_at = problem, now
        return True

    def recover(self, now: float) -> PDError | None:
        """While `broken`: asks for a new offer and takes it. Returns the error that ends the task, if it is in vain."""
        assert self.task.retry is not None
        # Nothing of the old connection is dropped while it is under way.
        if not self.pulling:
            self.link = None
            if not self.asked:
                self.asked = True
                self.task.retry.ask()
            chunks = self.task.retry.answer()
            if chunks is not None:
                self.chunks, self.broken = chunks, None
                # All of them: what a connection delivers while it breaks may be ready, without an error, and wrong.
                self.todo = deque(range(len(chunks)))
                return None
        age = now - self.broken_at
        if age < OFFER_AGAIN_WITHIN:
            return None
        return reasons.not_offered_again(self.task.room, self.task.who, self.broken, age)


@dataclass(eq=False)
class Orphan:
    """Arrays of a transfer that is over. Dropping them while they arrive is not safe, so they are kept until ready."""

    peer: Peer
    link: Link
    arrays: list[jax.Array]
    nbytes: int
    give_up: float
