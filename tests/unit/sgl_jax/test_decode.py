"""D's scheduler: when pages are reserved, when a request may run, and what happens when it may not."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.sgl_jax import compat
from sgl_pd_connector.sgl_jax.decode import SchedulerDisaggregationDecodeMixin
from sgl_pd_connector.sgl_jax.requests import PDRequest
from tests.unit.sgl_jax.fakes import FakeBatch, FakePages, FakeRequest, FakeScheduler, FakeTransfer

pytestmark = pytest.mark.unit

POOL = 16


class Scheduler(SchedulerDisaggregationDecodeMixin, FakeScheduler):  # type: ignore[misc]
    def __init__(self, *flags: str, pages: int = POOL, cached: int = 0) -> None:
        FakeScheduler.__init__(self, "--disaggregation-mode", "decode", *flags)
        self._pages: Any = FakePages(pages, cached)
        self._received = {}
        self._recv_queue = self._create_recv_queue()


@pytest.fixture(autouse=True)
def finish_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sgl-jax there is no ``FINISH_ABORT``."""

    def fail(req: Any, message: str, status: HTTPStatus | None) -> None:
        req.finished_reason = SimpleNamespace(message=message, status_code=status, is_error=True)

    monkeypatch.setattr(compat, "fail", fail)


def record(num_tokens: int) -> PDRequest:
    return PDRequest(room=7, prompt=b"digest", num_tokens=num_tokens, bootstrap_addr="127.0.0.1:1")


def arrive(scheduler: Scheduler, rid: str = "a", length: int = 40) -> tuple[FakeRequest, FakeTransfer]:
    req = FakeRequest(rid, length, record(length - 1))
    scheduler._add_request_to_queue(req)
    return req, scheduler.kv_manager.made[-1]


def receive(scheduler: Scheduler, rid: str = "a", length: int = 40) -> FakeRequest:
    """A request whose KV has arrived."""
    req, receiver = arrive(scheduler, rid, length)
    receiver.state = KVPoll.WaitingForInput
    scheduler._poll_transfers()
    receiver.state = KVPoll.Success
    scheduler._poll_transfers()
    return req


def admit(scheduler: Scheduler, *reqs: FakeRequest) -> None:
    """sgl-jax takes the requests into a batch."""
    scheduler.next_batch = FakeBatch(*reqs)
    scheduler.get_new_batch_prefill()


def test_an_ordinary_request_goes_straight_to_the_queue() -> None:
    scheduler = Scheduler()
    req = FakeRequest("a")
    scheduler._add_request_to_queue(req)
    assert scheduler.waiting_queue == [req]


def test_a_request_waits_outside_the_queue_until_its_kv_is_here() -> None:
    scheduler = Scheduler()
    req, receiver = arrive(scheduler)
    assert receiver.created_with == (7, b"digest", 39, "127.0.0.1:1")
    scheduler._poll_transfers()
    assert (scheduler.waiting_queue, scheduler._pages.free) == ([], POOL)
    receiver.state = KVPoll.WaitingForInput
    scheduler._poll_transfers()
    assert receiver.pages == [62, 63, 64]
    assert (scheduler.waiting_queue, scheduler._pages.free) == ([], POOL - 3)
    receiver.state = KVPoll.Success
    scheduler._poll_transfers()
    assert scheduler.waiting_queue == [req]
    assert scheduler._num_transfers() == 1


def test_an_admitted_request_owns_its_pages_and_the_cache_its_own() -> None:
    scheduler = Scheduler(cached=1)
    req = receive(scheduler)
    admit(scheduler, req)
    assert scheduler._num_transfers() == 0
    assert scheduler._pages.locks == 0
    assert (req.cache_protected_len, req.cached_tokens) == (16, 16)
    assert "init_next_round_input" not in vars(req)


def test_what_the_cache_holds_is_not_pulled() -> None:
    scheduler = Scheduler(cached=2)
    _, receiver = arrive(scheduler)
    receiver.state = KVPoll.WaitingForInput
    scheduler._poll_transfers()
    assert (receiver.pages, receiver.skipped) == ([62], 2)


def test_a_queued_request_keeps_its_prefix_however_often_it_is_matched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        FakeRequest,
        "init_next_round_input",
        lambda self, tree_cache=None: seen.append(len(self.prefix_indices)),
    )
    scheduler = Scheduler()
    req = receive(scheduler)
    for _ in range(3):
        req.prefix_indices = []
        req.init_next_round_input()
    assert seen == [39, 39, 39]


def test_pages_are_reserved_in_order_of_arrival() -> None:
    scheduler = Scheduler(pages=8)
    busy = receive(scheduler, "busy", length=60)
    _, large = arrive(scheduler, "large", length=100)
    _, small = arrive(scheduler, "small", length=17)
    large.state = small.state = KVPoll.WaitingForInput
    scheduler._poll_transfers()
    assert (large.pages, small.pages) == (None, None)
    admit(scheduler, busy)
    scheduler._pages.free = 8
    scheduler._poll_transfers()
    assert large.pages is not None


def test_room_is_left_for_a_request_to_run_in() -> None:
    scheduler = Scheduler(pages=5)
    receive(scheduler, "first", length=17)
    req, receiver = arrive(scheduler, length=49)
    # Three pages of four would be free for it, but not for the nine tokens it has to compute.
    receiver.state = KVPoll.WaitingForInput
    scheduler._pages.free = 3
    scheduler._poll_transfers()
    assert receiver.pages is None
    assert req not in scheduler.waiting_queue


def test_a_request_alone_is_never_held_up() -> None:
    scheduler = Scheduler(pages=3)
    _, receiver = arrive(scheduler, length=40)
    receiver.state = KVPoll.WaitingForInput
    scheduler._poll_transfers()
    assert receiver.pages is not None


def test_a_failed_transfer_is_recomputed() -> None:
    scheduler = Scheduler()
    req, receiver = arrive(scheduler)
    receiver.state = KVPoll.WaitingForInput
    scheduler._poll_transfers()
    receiver.fail("P is gone")
    scheduler._poll_transfers()
    assert scheduler.waiting_queue == [req]
    assert scheduler._pages.free == POOL
    assert scheduler._num_transfers() == 0


def test_with_the_policy_fail_the_client_gets_an_error() -> None:
    scheduler = Scheduler("--disaggregation-failure-policy", "fail")
    req, receiver = arrive(scheduler)
    receiver.fail("P is gone")
    scheduler._poll_transfers()
    assert scheduler.waiting_queue == []
    assert scheduler.streamed == [req]
    assert req.finished_reason.status_code == HTTPStatus.BAD_GATEWAY
    assert "P is gone" in req.finished_reason.message


def test_what_sgl_jax_refuses_is_told_to_p() -> None:
    scheduler = Scheduler()
    req = FakeRequest("a", pd=record(39))
    req.to_finish = SimpleNamespace(message="too long")
    scheduler._add_request_to_queue(req)
    assert scheduler.waiting_queue == [req]
    assert "too long" in scheduler.kv_manager.made[0].reason


def test_a_client_that_leaves_before_the_pull_is_answered_and_its_pages_come_back() -> None:
    scheduler = Scheduler()
    req, receiver = arrive(scheduler)
    receiver.state = KVPoll.WaitingForInput
    scheduler._poll_transfers()
    scheduler.abort_request(SimpleNamespace(rid="a", abort_all=False))
    assert receiver.state is KVPoll.Failed
    assert scheduler.streamed == [req]
    assert (scheduler._pages.free, scheduler._num_transfers()) == (POOL, 0)


def test_a_client_that_leaves_after_it_costs_no_pages() -> None:
    scheduler = Scheduler()
    receive(scheduler)
    scheduler.abort_request(SimpleNamespace(rid="a", abort_all=False))
    assert (scheduler._pages.free, scheduler._pages.locks, scheduler._num_transfers()) == (POOL, 0, 0)


def test_waiting_requests_give_their_pages_to_running_ones() -> None:
    scheduler = Scheduler()
    first, second = receive(scheduler, "first"), receive(scheduler, "second")
    running = FakeBatch(FakeRequest("running"))
    needed = iter([False, True])
    running.check_decode_mem = lambda: next(needed)  # type: ignore[method-assign]
    scheduler.update_running_batch(running)
    # The newest goes first, and stays in the queue as an ordinary request.
    assert list(scheduler._received) == [id(first)]
    assert "init_next_round_input" not in vars(second)
    assert scheduler.waiting_queue == [first, second]


def test_received_requests_that_block_each_other_are_recomputed_one_by_one() -> None:
    scheduler = Scheduler()
    first, second = receive(scheduler, "first"), receive(scheduler, "second")
    _, pulled = arrive(scheduler, "pulled")
    pulled.state = KVPoll.WaitingForInput
    scheduler._poll_transfers()
    assert scheduler.get_new_batch_prefill() is None
    # The pull ends by itself; only then is something given up.
    assert list(scheduler._received) == [id(first), id(second)]
    pulled.fail("P is gone")
    scheduler._poll_transfers()
    assert scheduler.get_new_batch_prefill() is None
    assert list(scheduler._received) == [id(first)]


def test_a_batch_that_was_full_is_looked_at_again_when_it_is_empty() -> None:
    scheduler = Scheduler()
    scheduler.running_batch.reqs_info[0].batch_is_full = True
    scheduler.get_new_batch_prefill()
    assert scheduler.running_batch.reqs_info[0].batch_is_full is False


def test_pages_are_not_counted_while_transfers_hold_some() -> None:
    scheduler = Scheduler()
    assert scheduler._can_flush_cache() == (True, "")
    arrive(scheduler)
    assert scheduler._can_flush_cache()[0] is False
