"""Records and counters of finished transfers."""

from __future__ import annotations

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import (
    BootstrapError,
    IncompatiblePeerError,
    PDError,
    TransferAbortedError,
    TransferError,
    TransferTimeoutError,
)
from sgl_pd_connector.transfer import stats
from sgl_pd_connector.transfer.stats import Recorder, TransferRecord

pytestmark = pytest.mark.unit

OK_TIMES = {
    KVPoll.Bootstrapping: 1.0,
    KVPoll.WaitingForInput: 2.0,
    KVPoll.Transferring: 4.0,
    KVPoll.Success: 8.0,
}


def record(
    entered: dict[KVPoll, float] = OK_TIMES, error: PDError | None = None, pulled_at: float | None = 7.0
) -> TransferRecord:
    return TransferRecord.of(
        role="decode",
        room=3,
        entered=entered,
        error=error,
        num_tokens=40,
        pages=3,
        nbytes=300,
        retries=1,
        pulled_at=pulled_at,
    )


def test_a_success_has_a_time_for_every_stage() -> None:
    done = record()
    assert done.ok
    assert (done.bootstrap_s, done.input_s, done.transfer_s, done.pull_s) == (1.0, 2.0, 4.0, 3.0)
    assert (done.pages, done.nbytes, done.error) == (3, 300, "")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TransferTimeoutError("late"), "timeout"),
        (TransferAbortedError("gone"), "aborted"),
        (TransferError("broken"), "failed"),
        (IncompatiblePeerError("other"), "failed"),
        (BootstrapError("nowhere"), "failed"),
    ],
)
def test_a_failure_has_moved_nothing_and_says_why(error: PDError, outcome: str) -> None:
    failed = record({KVPoll.Bootstrapping: 1.0, KVPoll.Failed: 6.0}, error, None)
    assert not failed.ok
    assert (failed.outcome, failed.error, failed.pages, failed.nbytes) == (outcome, str(error), 0, 0)
    assert (failed.bootstrap_s, failed.input_s, failed.transfer_s, failed.pull_s) == (5.0, 0.0, 0.0, 0.0)


def test_the_stage_that_failed_ends_with_the_failure() -> None:
    entered = OK_TIMES | {KVPoll.Failed: 9.0}
    del entered[KVPoll.Success]
    assert record(entered, TransferError("x")).transfer_s == 5.0


def test_counters_add_up_and_records_are_taken_once() -> None:
    recorder = Recorder()
    recorder.add(record())
    recorder.add(record())
    recorder.add(record({KVPoll.Bootstrapping: 1.0, KVPoll.Failed: 6.0}, TransferAbortedError("gone")))
    totals = recorder.totals
    assert (totals.ok, totals.aborted, totals.failed, totals.timeout) == (2, 1, 0, 0)
    assert (totals.pages, totals.nbytes, totals.retries) == (6, 600, 3)
    assert [done.outcome for done in recorder.take()] == ["ok", "ok", "aborted"]
    assert recorder.take() == []
    assert recorder.totals.ok == 2


def test_records_that_nobody_takes_do_not_grow_without_bound() -> None:
    recorder = Recorder()
    for _ in range(stats.MAX_RECORDS + 5):
        recorder.add(record())
    assert recorder.totals.ok == stats.MAX_RECORDS + 5
    assert len(recorder.take()) == stats.MAX_RECORDS
