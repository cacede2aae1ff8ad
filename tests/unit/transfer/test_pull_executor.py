"""Pull -> always wait -> write -> done, for many transfers on one thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import TransferAbortedError, TransferError, TransferTimeoutError
from sgl_pd_connector.transfer import links, pull_executor
from sgl_pd_connector.transfer.budget import ByteBudget
from sgl_pd_connector.transfer.lifecycle import Lifecycle
from sgl_pd_connector.transfer.plan import PullChunk
from sgl_pd_connector.transfer.pull_executor import WINDOW, PullExecutor, PullTask
from sgl_pd_connector.transfer.transport import Peer
from tests.unit.transfer.fakes import FakeTransport, FakeWriter, wait_until

pytestmark = pytest.mark.unit

P1 = Peer("prefill-1", 1, "10.0.0.1:1")
P2 = Peer("prefill-2", 2, "10.0.0.2:1")
SIZE = 10  # bytes of a chunk
GONE = TransferAbortedError("client gone")
LATE = TransferTimeoutError("too late")


class D:
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

    def task(self, *uuids: int, peer: Peer = P1, pulled: Any = lambda: None) -> PullTask:
        life = Lifecycle(0.0)
        life.advance(KVPoll.WaitingForInput, 0.0)
        life.advance(KVPoll.Transferring, 0.0)
        chunks = [PullChunk(uuid, 1, np.array([uuid], np.int32), 0) for uuid in uuids]
        specs: Any = [("layer group 1", "layer group 2")] * len(uuids)
        return PullTask(7, life, peer, chunks, specs, [SIZE] * len(uuids), pulled)

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


@pytest.fixture
def d() -> Iterator[D]:
    d = D()
    yield d
    d.executor.close()
    assert d.budget.held == 0
    assert d.executor.in_flight == 0


def test_a_transfer_is_pulled_written_and_done(d: D) -> None:
    task, future = d.start(1, 2)
    d.finish(future, [1, 2])
    assert task.life.state is KVPoll.Success
    assert [write.page_ids.tolist() for write in d.writer.carried_out] == [[1], [2]]
    assert d.budget.held == 0


def test_it_is_never_done_before_everything_is_ready_and_written(d: D) -> None:
    task, future = d.start(1)
    first, second = d.transport.arrays(1)

    def is_open() -> bool:
        d.let_it_run()
        return not future.done() and task.life.state is KVPoll.Transferring

    assert is_open()
    first.arrive()
    assert is_open(), "one of two buffers is not a chunk"
    assert d.writer.queued == []
    second.arrive()
    wait_until(lambda: d.writer.queued)
    assert is_open(), "queued is not written"
    [token] = d.writer.dispatch()
    assert is_open(), "dispatched is not written"
    token.arrive()
    future.result(20)
    assert task.life.state is KVPoll.Success


def test_chunks_are_written_as_they_arrive_in_order(d: D) -> None:
    _, future = d.start(1, 2, 3)
    d.transport.arrive(2)
    d.let_it_run()
    assert d.writer.queued == []
    d.transport.arrive(1)
    d.writer.write_all(2)
    assert [int(write.page_ids[0]) for write in d.writer.carried_out] == [1, 2]
    d.finish(future, [3])


def test_a_few_chunks_are_under_way_at_once(d: D) -> None:
    uuids = list(range(1, WINDOW + 3))
    _, future = d.start(*uuids)
    d.transport.arrays(WINDOW)
    d.let_it_run()
    assert not d.transport.started(WINDOW + 1)
    d.transport.arrive(1)
    d.transport.arrays(WINDOW + 1)  # while chunk 1 is not written yet
    d.writer.write_all(1)
    d.finish(future, uuids[1:])


def test_the_moment_of_arrival_is_told_once_before_the_last_write(d: D) -> None:
    seen: list[int] = []
    _, future = d.start(1, 2, pulled=lambda: seen.append(len(d.writer.carried_out)))
    d.finish(future, [1, 2])
    assert len(seen) == 1
    assert seen[0] < 2


def test_with_nothing_to_pull_it_is_done_without_a_connection(d: D) -> None:
    task, future = d.start()
    future.result(20)
    assert task.life.state is KVPoll.Success
    assert d.transport.links == []


# Errors.


def test_an_error_hidden_in_ready_arrays_fails_the_transfer_with_its_text(d: D) -> None:
    task, future = d.start(1, 2)
    fine, broken = d.transport.arrays(1)
    fine.arrive()
    broken.break_off("Buffer id out of range")
    with pytest.raises(TransferError) as failure:
        future.result(20)
    assert str(failure.value) == (
        "room 7: pull from prefill instance prefill-1 at 10.0.0.1:1 failed: Buffer id out of range"
    )
    assert task.life.state is KVPoll.Failed
    assert d.writer.queued == [], "nothing of a broken chunk is written"


def test_after_an_error_the_next_transfer_gets_a_new_connection(d: D) -> None:
    _, future = d.start(1)
    d.transport.arrays(1)[0].break_off()
    d.transport.arrays(1)[1].break_off()
    assert isinstance(future.exception(20), TransferError)
    _, again = d.start(2)
    d.finish(again, [2])
    assert [link.is_cut for link in d.transport.links] == [True, False]


def test_after_an_error_what_else_was_under_way_is_waited_for(d: D) -> None:
    _, future = d.start(1, 2)
    d.transport.arrays(2)
    for array in d.transport.arrays(1):
        array.break_off()
    assert isinstance(future.exception(20), TransferError)
    d.let_it_run()
    assert not d.transport.links[0].is_cut
    d.transport.arrive(2)
    wait_until(lambda: d.transport.links[0].is_closed)


def test_an_error_of_one_transfer_does_not_touch_the_others_on_the_same_connection(d: D) -> None:
    _, healthy = d.start(1, 2)
    d.transport.arrays(2)
    _, broken = d.start(3)
    for array in d.transport.arrays(3):
        array.break_off("uuid was released")
    assert broken.exception(20) is not None
    d.let_it_run()
    link = d.transport.links[0]
    assert not link.is_cut
    d.finish(healthy, [1, 2])
    wait_until(lambda: link.is_cut, "the connection is dropped after its last transfer")


@pytest.mark.parametrize("where", ["link", "pull"])
def test_a_pull_that_cannot_be_started_fails_alone(
    d: D, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "link":
        d.transport.link_error = RuntimeError("no more sockets")
    else:
        d.transport.pull_error = RuntimeError("no more sockets")
    task, future = d.start(1)
    with pytest.raises(TransferError, match="no more sockets"):
        future.result(20)
    assert task.life.state is KVPoll.Failed
    d.transport.link_error = d.transport.pull_error = None
    _, again = d.start(2)
    d.finish(again, [2])
    assert "pull from prefill instance prefill-1 at 10.0.0.1:1 failed: no more sockets" in caplog.text


@pytest.mark.parametrize("where", ["dispatch", "device"])
def test_a_write_that_fails_fails_the_transfer_and_not_the_connection(d: D, where: str) -> None:
    task, future = d.start(1)
    d.transport.arrive(1)
    wait_until(lambda: d.writer.queued)
    if where == "dispatch":
        d.writer.queued[0].error = ValueError("out of memory")
    else:
        d.writer.dispatch()[0].break_off("out of memory")
    with pytest.raises(TransferError, match=r"cannot write what came from .* into the pool: out of memory"):
        future.result(20)
    assert task.life.state is KVPoll.Failed
    d.let_it_run()
    assert not d.transport.links[0].is_cut


def test_a_surprise_in_a_callback_fails_that_transfer_only(d: D) -> None:
    _, future = d.start(1, pulled=lambda: 1 / 0)
    _, other = d.start(2)
    d.transport.arrive(1)
    assert isinstance(future.exception(20), TransferError)
    d.writer.queued.clear()
    d.finish(other, [2])


# The end of a life from outside: an abort, a deadline, the peer's FAILED.


def test_an_abort_ends_the_future_with_its_reason(d: D) -> None:
    task, future = d.start(1)
    d.transport.arrays(1)
    task.life.fail(GONE, 0.0)
    assert future.exception(20) is GONE


def test_arrays_still_arriving_are_kept_and_counted_until_they_are_there(d: D) -> None:
    task, future = d.start(1, 2)
    d.transport.arrays(2)
    task.life.fail(GONE, 0.0)
    assert future.exception(20) is GONE
    d.let_it_run()
    assert d.budget.held == 2 * SIZE
    assert d.executor.in_flight == 2
    d.transport.arrive(1)
    wait_until(lambda: d.budget.held == SIZE)
    d.transport.arrays(2)[0].break_off()
    d.transport.arrays(2)[1].break_off()
    wait_until(lambda: d.executor.in_flight == 0)
    assert d.budget.held == 0
    assert not d.transport.links[0].is_cut, "an abort is no reason to disturb a connection"


def test_leftovers_that_never_arrive_are_given_up_with_the_connection() -> None:
    d = D(orphan_timeout=0.01)
    task, future = d.start(1)
    d.transport.arrays(1)
    task.life.fail(GONE, 0.0)
    assert future.exception(20) is GONE
    wait_until(lambda: d.budget.held == 0)
    assert d.transport.links[0].is_cut
    d.executor.close()


def test_what_was_queued_for_writing_is_given_back_at_an_abort(d: D) -> None:
    task, future = d.start(1)
    d.transport.arrive(1)
    wait_until(lambda: d.writer.queued)
    task.life.fail(GONE, 0.0)
    assert future.exception(20) is GONE
    assert d.budget.held == 0
    assert d.writer.queued[0].life.is_final, "the writer will see that it is over"


def test_an_abort_before_the_start_pulls_nothing(d: D) -> None:
    task = d.task(1)
    task.life.fail(GONE, 0.0)
    assert d.executor.submit(task).exception(20) is GONE
    assert not d.transport.started(1)


def test_a_timeout_drops_the_connection_and_gives_the_bytes_back(d: D) -> None:
    task, future = d.start(1, 2)
    d.transport.arrays(2)
    task.life.fail(LATE, 0.0)
    assert future.exception(20) is LATE
    wait_until(lambda: d.budget.held == 0)
    assert d.transport.links[0].is_cut
    d.transport.links[0].stuck = False
    _, again = d.start(3)
    d.finish(again, [3])


def test_a_timeout_of_one_transfer_leaves_the_others_on_the_connection_their_time(d: D) -> None:
    _, healthy = d.start(1)
    task, late = d.start(2)
    d.transport.arrays(2)
    task.life.fail(LATE, 0.0)
    assert late.exception(20) is LATE
    d.finish(healthy, [1])
    wait_until(lambda: d.transport.links[0].is_cut)
    wait_until(lambda: d.budget.held == 0)


def test_the_connection_to_a_stalled_peer_is_closed_only_when_the_peer_is_heard_again(d: D) -> None:
    # Closing it before would freeze the process.
    task, late = d.start(1)
    d.transport.arrays(1)
    task.life.fail(LATE, 0.0)
    assert late.exception(20) is LATE
    wait_until(lambda: d.transport.links[0].is_cut)
    _, other = d.start(2, peer=P2)
    d.finish(other, [2])
    d.let_it_run()
    assert not d.transport.links[0].is_closed
    d.transport.links[0].stuck = False
    _, again = d.start(3)
    d.finish(again, [3])
    wait_until(lambda: d.transport.links[0].is_closed)


def test_a_transfer_that_had_arrived_before_the_stall_is_no_sign_of_life(d: D) -> None:
    _, arrived = d.start(1)
    d.transport.arrive(1)
    wait_until(lambda: d.writer.queued)
    task, late = d.start(2)
    d.transport.arrays(2)
    task.life.fail(LATE, 0.0)
    assert late.exception(20) is LATE
    d.writer.write_all(1)
    arrived.result(20)
    wait_until(lambda: d.transport.links[0].is_cut)
    assert not d.transport.links[0].is_closed


def test_a_restarted_peer_gets_a_new_connection_and_the_old_one_is_dropped(d: D) -> None:
    _, before = d.start(1)
    d.finish(before, [1])
    _, after = d.start(2, peer=P1._replace(epoch=2, transfer_addr="10.0.0.1:9"))
    d.finish(after, [2])
    wait_until(lambda: d.transport.links[0].is_closed)
    assert not d.transport.links[1].is_cut


# Many at once.


def test_a_stalled_peer_holds_up_nobody_else(d: D) -> None:
    stalled, stalled_future = d.start(1, peer=P1)
    d.transport.arrays(1)
    for uuid in range(10, 15):
        _, future = d.start(uuid, peer=P2)
        d.finish(future, [uuid])
    assert not stalled_future.done()
    stalled.life.fail(LATE, 0.0)
    assert stalled_future.exception(20) is LATE
    assert [link.is_cut for link in d.transport.links] == [True, False]


def test_above_the_budget_pulls_wait() -> None:
    d = D(limit=2 * SIZE)
    _, first = d.start(1, 2, 3)
    _, second = d.start(4)
    d.transport.arrays(2)
    d.let_it_run()
    assert not d.transport.started(3)
    assert not d.transport.started(4)
    assert d.budget.held == 2 * SIZE
    d.transport.arrive(1)
    d.let_it_run()
    assert not d.transport.started(3), "bytes are held until they are written"
    d.writer.write_all(1)
    d.finish(first, [2, 3])
    d.finish(second, [4])
    d.executor.close()


def test_a_chunk_larger_than_the_budget_is_pulled_alone() -> None:
    d = D(limit=SIZE - 1)
    _, first = d.start(1, 2)
    d.transport.arrays(1)
    d.let_it_run()
    assert not d.transport.started(2)
    d.finish(first, [1, 2])
    d.executor.close()


def test_many_transfers_at_once_all_end(d: D) -> None:
    started = [d.start(2 * i, 2 * i + 1, peer=(P1, P2)[i % 2]) for i in range(1, 50)]
    stop = threading.Event()

    def engine() -> None:
        while not stop.is_set():
            for token in d.writer.dispatch():
                token.arrive()
            time.sleep(0.0005)

    thread = threading.Thread(target=engine)
    thread.start()
    for i in range(2, 100):
        d.transport.arrive(i)
    for task, future in started:
        future.result(20)
        assert task.life.state is KVPoll.Success
    stop.set()
    thread.join()


# Stopping.


def test_close_aborts_what_is_stuck_and_drops_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_executor, "STOP_GRACE", 0.01)
    d = D()
    task, future = d.start(1, 2)
    _, other = d.start(3, peer=P2)
    d.transport.arrays(2)
    d.transport.arrive(3)
    d.executor.close()
    for ended in (future, other):
        assert isinstance(ended.exception(0), TransferAbortedError)
    assert task.life.state is KVPoll.Failed
    assert [link.is_closed for link in d.transport.links] == [False, True], "one is stuck"
    assert (d.budget.held, d.executor.in_flight) == (0, 0)
    d.executor.close()


def test_close_lets_arrive_what_is_about_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_executor, "STOP_GRACE", 60.0)
    d = D()
    _, future = d.start(1)
    arrays = d.transport.arrays(1)
    future.add_done_callback(lambda _: [array.arrive() for array in arrays])
    d.executor.close()
    assert d.transport.links[0].is_closed
    assert d.budget.held == 0


def test_close_without_work_ends_the_thread() -> None:
    d = D()
    d.executor.close()
    assert not d.executor._thread.is_alive()


def test_a_connection_that_nobody_used_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, d: D
) -> None:
    monkeypatch.setattr(links, "LINK_IDLE", 0.2)
    monkeypatch.setattr(pull_executor, "IDLE_CHECK", 0.05)
    _, future = d.start(1)
    d.finish(future, [1])
    [first] = d.transport.links
    wait_until(lambda: first.is_cut, "the idle connection dropped")
    _, future = d.start(2)
    d.finish(future, [2])
    assert len(d.transport.links) == 2


def test_a_connection_in_use_is_not_idle_however_slow_it_is(monkeypatch: pytest.MonkeyPatch, d: D) -> None:
    monkeypatch.setattr(links, "LINK_IDLE", 0.1)
    monkeypatch.setattr(pull_executor, "IDLE_CHECK", 0.05)
    _, slow = d.start(1)
    d.transport.arrays(1)
    for uuid in (2, 3):
        _, future = d.start(uuid, peer=P2)
        d.finish(future, [uuid])
        wait_until(lambda: d.transport.links[-1].is_cut, "the other connection, which is idle, dropped")
    assert not d.transport.links[0].is_cut
    d.finish(slow, [1])
