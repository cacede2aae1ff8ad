"""What a manager has done: counters, gauges, and one record per finished transfer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import PDError, TransferAbortedError, TransferTimeoutError

MAX_RECORDS = 10_000
"""Records kept for whoever collects them; beyond it the oldest are dropped, the counters stay right."""


def _between(entered: Mapping[KVPoll, float], start: KVPoll, *ends: KVPoll) -> float:
    """Seconds from entering ``start`` to the first entered of ``ends``; 0 when either never happened."""
    end = next((entered[state] for state in ends if state in entered), None)
    return max(0.0, end - entered[start]) if end is not None and start in entered else 0.0


@dataclass(frozen=True)
class TransferRecord:
    """One finished transfer, as one side saw it.

    Attributes:
        role: ``"prefill"`` or ``"decode"``.
        room: the router's room.
        outcome: ``"ok"``, ``"failed"``, ``"timeout"`` or ``"aborted"``.
        error: the failure's text, empty when ok.
        num_tokens: tokens of the prompt, 0 if never known.
        pages: P: offered, that is all of the prompt; D: written, that is those it did not hold already. 0 unless ok.
        nbytes: P: offered; D: pulled over the wire, in whole chunks, so of a chunk that begins with pages D holds
            those too. 0 unless ok. What was pulled again counts once.
        retries: how often it was begun anew: everything was offered again after an error on the way.
        bootstrap_s: seconds until the two sides had met (P) or P was ready (D).
        input_s: seconds from then until the prefill was done (P) or pages were given (D).
        transfer_s: seconds from then until everything was pulled, written and reported.
        pull_s: of those, seconds until everything was pulled (D).
    """

    role: str
    room: int
    outcome: str
    error: str
    num_tokens: int
    pages: int
    nbytes: int
    retries: int
    bootstrap_s: float
    input_s: float
    transfer_s: float
    pull_s: float

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @classmethod
    def of(
        cls,
        *,
        role: str,
        room: int,
        entered: Mapping[KVPoll, float],
        error: PDError | None,
        num_tokens: int,
        pages: int,
        nbytes: int,
        retries: int = 0,
        pulled_at: float | None = None,
    ) -> TransferRecord:
        """From the times at which a `Lifecycle` entered its states."""
        match error:
            case None:
                outcome = "ok"
            case TransferTimeoutError():
                outcome = "timeout"
            case TransferAbortedError():
                outcome = "aborted"
            case _:
                outcome = "failed"
        ends = (KVPoll.Success, KVPoll.Failed)
        began = entered.get(KVPoll.Transferring)
        return cls(
            role=role,
            room=room,
            outcome=outcome,
            error=str(error) if error else "",
            num_tokens=num_tokens,
            pages=pages if error is None else 0,
            nbytes=nbytes if error is None else 0,
            retries=retries,
            bootstrap_s=_between(entered, KVPoll.Bootstrapping, KVPoll.WaitingForInput, *ends),
            input_s=_between(entered, KVPoll.WaitingForInput, KVPoll.Transferring, *ends),
            transfer_s=_between(entered, KVPoll.Transferring, *ends),
            pull_s=pulled_at - began if pulled_at is not None and began is not None else 0.0,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class TransferStats:
    """A snapshot. Counters count since the manager was made; gauges are of now.

    Attributes:
        ok, failed, timeout, aborted: finished transfers by outcome.
        nbytes, pages: of those that were ok, as in `TransferRecord`.
        retries: of all of them together.
        in_flight: transfers that are not over.
        packed_bytes: P: device memory held for packed copies.
        registered_bytes: P: of those, registered with the native transfer server.
        pulled_bytes: D: device memory held for data pulled and not yet written.
        waiting_sends: P: prompts that wait for room in the packed budget.
        bad_frames: side-channel frames that were not understood.
        compilations: gather and scatter shapes compiled; constant after warm-up.
    """

    ok: int = 0
    failed: int = 0
    timeout: int = 0
    aborted: int = 0
    nbytes: int = 0
    pages: int = 0
    retries: int = 0
    in_flight: int = 0
    packed_bytes: int = 0
    registered_bytes: int = 0
    pulled_bytes: int = 0
    waiting_sends: int = 0
    bad_frames: int = 0
    compilations: int = 0


@dataclass
class Recorder:
    """Collects records from any thread. The lock is a leaf.

    Attributes:
        totals: counters since start.
        sink: gets each record, on the thread that adds it.
    """

    totals: TransferStats = field(default_factory=TransferStats)
    sink: Callable[[TransferRecord], None] | None = None
    _records: deque[TransferRecord] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, record: TransferRecord) -> None:
        with self._lock:
            totals = self.totals
            setattr(totals, record.outcome, getattr(totals, record.outcome) + 1)
            totals.nbytes += record.nbytes
            totals.pages += record.pages
            totals.retries += record.retries
            self._records.append(record)
        if self.sink is not None:
            self.sink(record)

    def take(self) -> list[TransferRecord]:
        """The records since the last call."""
        with self._lock:
            records = list(self._records)
            self._records.clear()
            return records
