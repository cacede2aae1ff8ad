"""Pull -> always wait -> write -> done, for many transfers on one thread."""

from __future__ import annotations

import threading
import time

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import TransferAbortedError, TransferError
from sgl_pd_connector.transfer import budget, pull_executor
from sgl_pd_connector.transfer.pull_executor import WINDOW
from tests.unit.transfer.fakes import wait_until
from tests.unit.transfer.pulls import GONE, LATE, P1, P2, SIZE, Pulls

pytestmark = pytest.mark.unit


def test_a_transfer_is_pulled_written_and_done(pulls: Pulls) -> None:
    task, future = pulls.start(1, 2)
    pulls.finish(future, [1, 2])
    assert task.life.state is KVPoll.Success
    assert [write.page_ids.tolist() for write in pulls.writer.carried_out] == [[1], [2]]
    assert pulls.budget.held == 0


def test_it_is_never_done_before_everything_is_ready_and_written(pulls: Pulls) -> None:
    task, future = pulls.start(1)
    first, second = pulls.transport.arrays(1)

    def is_open() -> bool:
        pulls.let_it_run()
        return not future.done() and task.life.state is KVPoll.Transferring

    assert is_open()
    first.arrive()
    assert is_open(), "one of two buffers is not a chunk"
    assert pulls.writer.queued == []
    second.arrive()
    wait_until(lambda: pulls.writer.queued)
    assert is_open(), "queued is not written"
    [token] = pulls.writer.dispatch()
    assert is_open(), "dispatched is not written"
    token.arrive()
    future.result(20)
    assert task.life.state is KVPoll.Success


def test_chunks_are_written_as_they_arrive(pulls: Pulls) -> None:
    _, future = pulls.start(1, 2, 3)
    pulls.transport.arrive(2)
    pulls.writer.write_all(1)
    pulls.transport.arrive(1)
    pulls.writer.write_all(1)
    assert [int(write.page_ids[0]) for write in pulls.writer.carried_out] == [2, 1]
    pulls.finish(future, [3])


def test_an_error_is_seen_behind_a_chunk_that_hangs(pulls: Pulls) -> None:
    _, future = pulls.start(1, 2)
    pulls.transport.arrays(2)[0].break_off()
    pulls.transport.arrays(2)[1].arrive()
    assert isinstance(future.exception(20), TransferError)
    pulls.transport.arrive(1)


def test_a_few_chunks_are_under_way_at_once(pulls: Pulls) -> None:
    uuids = list(range(1, WINDOW + 3))
    _, future = pulls.start(*uuids)
    pulls.transport.arrays(WINDOW)
    pulls.let_it_run()
    assert not pulls.transport.started(WINDOW + 1)
    pulls.transport.arrive(1)
    pulls.transport.arrays(WINDOW + 1)  # while chunk 1 is not written yet
    pulls.writer.write_all(1)
    pulls.finish(future, uuids[1:])


def test_the_moment_of_arrival_is_told_once_before_the_last_write(pulls: Pulls) -> None:
    seen: list[int] = []
    _, future = pulls.start(1, 2, pulled=lambda: seen.append(len(pulls.writer.carried_out)))
    pulls.finish(future, [1, 2])
    assert len(seen) == 1
    assert seen[0] < 2


def test_with_nothing_to_pull_it_is_done_without_a_connection(pulls: Pulls) -> None:
    task, future = pulls.start()
    future.result(20)
    assert task.life.state is KVPoll.Success
    assert pulls.transport.links == []


# Errors.


def test_an_error_hidden_in_ready_arrays_fails_the_transfer_with_its_text(pulls: Pulls) -> None:
    task, future = pulls.start(1, 2)
    fine, broken = pulls.transport.arrays(1)
    fine.arrive()
    broken.break_off("Buffer id out of range")
    with pytest.raises(TransferError) as failure:
        future.result(20)
    assert str(failure.value) == (
        "room 7: pull from prefill instance prefill-1 at 10.0.0.1:1 failed: Buffer id out of range"
    )
    assert task.life.state is KVPoll.Failed
    assert pulls.writer.queued == [], "nothing of a broken chunk is written"


def test_after_an_error_the_next_transfer_gets_a_new_connection(pulls: Pulls) -> None:
    _, future = pulls.start(1)
    pulls.transport.arrays(1)[0].break_off()
    pulls.transport.arrays(1)[1].break_off()
    assert isinstance(future.exception(20), TransferError)
    pulls.move(2)
    assert [link.is_cut for link in pulls.transport.links] == [True, False]


def test_after_an_error_what_else_was_under_way_is_waited_for(pulls: Pulls) -> None:
    _, future = pulls.start(1, 2)
    pulls.transport.arrays(2)
    for array in pulls.transport.arrays(1):
        array.break_off()
    assert isinstance(future.exception(20), TransferError)
    pulls.let_it_run()
    assert not pulls.transport.links[0].is_cut
    pulls.transport.arrive(2)
    wait_until(lambda: pulls.transport.links[0].is_cut)


def test_an_error_of_one_transfer_does_not_touch_the_others_on_the_same_connection(pulls: Pulls) -> None:
    _, healthy = pulls.start(1, 2)
    pulls.transport.arrays(2)
    _, broken = pulls.start(3)
    for array in pulls.transport.arrays(3):
        array.break_off("uuid was released")
    assert broken.exception(20) is not None
    pulls.let_it_run()
    link = pulls.transport.links[0]
    assert not link.is_cut
    pulls.finish(healthy, [1, 2])
    wait_until(lambda: link.is_cut, "the connection is dropped after its last transfer")


@pytest.mark.parametrize("where", ["link", "pull"])
def test_a_pull_that_cannot_be_started_fails_alone(
    pulls: Pulls, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "link":
        pulls.transport.link_error = RuntimeError("no more sockets")
    else:
        pulls.transport.pull_error = RuntimeError("no more sockets")
    task, future = pulls.start(1)
    with pytest.raises(TransferError, match="no more sockets"):
        future.result(20)
    assert task.life.state is KVPoll.Failed
    pulls.transport.link_error = pulls.transport.pull_error = None
    pulls.move(2)
    assert "pull from prefill instance prefill-1 at 10.0.0.1:1 failed: no more sockets" in caplog.text


@pytest.mark.parametrize("where", ["dispatch", "device"])
def test_a_write_that_fails_fails_the_transfer_and_not_the_connection(pulls: Pulls, where: str) -> None:
    task, future = pulls.start(1)
    pulls.transport.arrive(1)
    wait_until(lambda: pulls.writer.queued)
    if where == "dispatch":
        pulls.writer.queued[0].error = ValueError("out of memory")
    else:
        pulls.writer.dispatch()[0].break_off("out of memory")
    with pytest.raises(TransferError, match=r"cannot write what came from .* into the pool: out of memory"):
        future.result(20)
    assert task.life.state is KVPoll.Failed
    pulls.let_it_run()
    assert not pulls.transport.links[0].is_cut


def test_a_surprise_in_a_callback_fails_that_transfer_only(pulls: Pulls) -> None:
    _, future = pulls.start(1, pulled=lambda: 1 / 0)
    _, other = pulls.start(2)
    pulls.transport.arrive(1)
    assert isinstance(future.exception(20), TransferError)
    pulls.writer.queued.clear()
    pulls.finish(other, [2])


# The end of a life from outside: an abort, a deadline, the peer's FAILED.


def test_an_abort_ends_the_future_with_its_reason(pulls: Pulls) -> None:
    task, future = pulls.start(1)
    pulls.transport.arrays(1)
    task.life.fail(GONE, 0.0)
    assert future.exception(20) is GONE


def test_arrays_still_arriving_are_kept_and_counted_until_they_are_there(pulls: Pulls) -> None:
    task, future = pulls.start(1, 2)
    pulls.transport.arrays(2)
    task.life.fail(GONE, 0.0)
    assert future.exception(20) is GONE
    pulls.let_it_run()
    assert pulls.budget.held == 2 * SIZE
    assert pulls.executor.in_flight == 2
    pulls.transport.arrive(1)
    wait_until(lambda: pulls.budget.held == SIZE)
    pulls.transport.arrays(2)[0].break_off()
    pulls.transport.arrays(2)[1].break_off()
    wait_until(lambda: pulls.executor.in_flight == 0)
    assert pulls.budget.held == 0
    assert not pulls.transport.links[0].is_cut, "an abort is no reason to disturb a connection"


def test_leftovers_that_never_arrive_are_given_up_with_the_connection() -> None:
    pulls = Pulls(orphan_timeout=0.01)
    task, future = pulls.start(1)
    pulls.transport.arrays(1)
    task.life.fail(GONE, 0.0)
    assert future.exception(20) is GONE
    wait_until(lambda: pulls.budget.held == 0)
    assert pulls.transport.links[0].is_cut
    pulls.executor.close()


def test_what_was_queued_for_writing_is_given_back_at_an_abort(pulls: Pulls) -> None:
    task, future = pulls.start(1)
    pulls.transport.arrive(1)
    wait_until(lambda: pulls.writer.queued)
    task.life.fail(GONE, 0.0)
    assert future.exception(20) is GONE
    assert pulls.budget.held == 0
    assert pulls.writer.queued[0].life.is_final, "the writer will see that it is over"


def test_an_abort_before_the_start_pulls_nothing(pulls: Pulls) -> None:
    task = pulls.task(1)
    task.life.fail(GONE, 0.0)
    assert pulls.executor.submit(task).exception(20) is GONE
    assert not pulls.transport.started(1)


def test_a_timeout_drops_the_connection_and_gives_the_bytes_back(pulls: Pulls) -> None:
    task, future = pulls.start(1, 2)
    pulls.transport.arrays(2)
    task.life.fail(LATE, 0.0)
    assert future.exception(20) is LATE
    wait_until(lambda: pulls.budget.held == 0)
    assert pulls.transport.links[0].is_cut
    pulls.move(3)


def test_a_timeout_of_one_transfer_leaves_the_others_on_the_connection_their_time(pulls: Pulls) -> None:
    _, healthy = pulls.start(1)
    task, late = pulls.start(2)
    pulls.transport.arrays(2)
    task.life.fail(LATE, 0.0)
    assert late.exception(20) is LATE
    pulls.finish(healthy, [1])
    wait_until(lambda: pulls.transport.links[0].is_cut)
    wait_until(lambda: pulls.budget.held == 0)


def test_a_restarted_peer_gets_a_new_connection_and_the_old_one_is_dropped(pulls: Pulls) -> None:
    pulls.move(1)
    _, after = pulls.start(2, peer=P1._replace(epoch=2, transfer_addr="10.0.0.1:9"))
    pulls.finish(after, [2])
    wait_until(lambda: pulls.transport.links[0].is_cut)
    assert not pulls.transport.links[1].is_cut


# Many at once.


def test_a_stalled_peer_holds_up_nobody_else(pulls: Pulls) -> None:
    stalled, stalled_future = pulls.start(1, peer=P1)
    pulls.transport.arrays(1)
    for uuid in range(10, 15):
        pulls.move(uuid, peer=P2)
    assert not stalled_future.done()
    stalled.life.fail(LATE, 0.0)
    assert stalled_future.exception(20) is LATE
    assert [link.is_cut for link in pulls.transport.links] == [True, False]


def test_above_the_budget_pulls_wait() -> None:
    pulls = Pulls(limit=2 * SIZE)
    _, first = pulls.start(1, 2, 3)
    _, second = pulls.start(4)
    pulls.transport.arrays(2)
    pulls.let_it_run()
    assert not pulls.transport.started(3)
    assert not pulls.transport.started(4)
    assert pulls.budget.held == 2 * SIZE
    pulls.transport.arrive(1)
    pulls.let_it_run()
    assert not pulls.transport.started(3), "bytes are held until they are written"
    pulls.writer.write_all(1)
    pulls.finish(first, [2, 3])
    pulls.finish(second, [4])
    pulls.executor.close()


def test_a_chunk_larger_than_the_budget_is_pulled_alone() -> None:
    pulls = Pulls(limit=SIZE - 1)
    _, first = pulls.start(1, 2)
    pulls.transport.arrays(1)
    pulls.let_it_run()
    assert not pulls.transport.started(2)
    pulls.finish(first, [1, 2])
    pulls.executor.close()


def test_a_large_chunk_is_not_starved_by_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "OVERTAKING", 0.0)
    pulls = Pulls(limit=2 * SIZE)
    _, small = pulls.start(1)
    pulls.transport.arrays(1)
    _, large = pulls.start(2, nbytes=2 * SIZE)
    _, late = pulls.start(3)
    pulls.let_it_run()
    assert not pulls.transport.started(3), "there is room for it, and somebody who has waited longer"
    pulls.finish(small, [1])
    pulls.finish(large, [2])
    pulls.finish(late, [3])
    pulls.executor.close()


def test_a_large_chunk_that_is_given_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "OVERTAKING", 0.0)
    pulls = Pulls(limit=2 * SIZE)
    _, small = pulls.start(1)
    pulls.transport.arrays(1)
    task, large = pulls.start(2, nbytes=2 * SIZE)
    _, late = pulls.start(3)
    pulls.let_it_run()
    task.life.fail(GONE, 0.0)
    assert large.exception(20) is GONE
    pulls.finish(late, [3])
    pulls.finish(small, [1])
    pulls.executor.close()


def test_many_transfers_at_once_all_end(pulls: Pulls) -> None:
    started = [pulls.start(2 * i, 2 * i + 1, peer=(P1, P2)[i % 2]) for i in range(1, 50)]
    stop = threading.Event()

    def engine() -> None:
        while not stop.is_set():
            for token in pulls.writer.dispatch():
                token.arrive()
            time.sleep(0.0005)

    thread = threading.Thread(target=engine)
    thread.start()
    for i in range(2, 100):
        pulls.transport.arrive(i)
    for task, future in started:
        future.result(20)
        assert task.life.state is KVPoll.Success
    stop.set()
    thread.join()


# Stopping.


def test_close_aborts_what_is_stuck_and_drops_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_executor, "STOP_GRACE", 0.01)
    pulls = Pulls()
    task, future = pulls.start(1, 2)
    _, other = pulls.start(3, peer=P2)
    pulls.transport.arrays(2)
    pulls.transport.arrive(3)
    pulls.executor.close()
    for ended in (future, other):
        assert isinstance(ended.exception(0), TransferAbortedError)
    assert task.life.state is KVPoll.Failed
    assert all(link.is_cut for link in pulls.transport.links)
    assert (pulls.budget.held, pulls.executor.in_flight) == (0, 0)
    pulls.executor.close()


def test_close_lets_arrive_what_is_about_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_executor, "STOP_GRACE", 60.0)
    pulls = Pulls()
    _, future = pulls.start(1)
    arrays = pulls.transport.arrays(1)
    future.add_done_callback(lambda _: [array.arrive() for array in arrays])
    pulls.executor.close()
    assert pulls.transport.links[0].is_cut
    assert pulls.budget.held == 0


def test_close_without_work_ends_the_thread() -> None:
    pulls = Pulls()
    pulls.executor.close()
    assert not pulls.executor._thread.is_alive()
