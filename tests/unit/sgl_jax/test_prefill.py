"""P's scheduler: when it sends, when it answers, what it keeps."""

from __future__ import annotations

from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.sgl_jax import compat
from sgl_pd_connector.sgl_jax.pools import PageGuard
from sgl_pd_connector.sgl_jax.prefill import SchedulerDisaggregationPrefillMixin
from sgl_pd_connector.sgl_jax.requests import PDRequest
from tests.unit.sgl_jax.fakes import PAGE, FakeBatch, FakeRequest, FakeScheduler, FakeTransfer

pytestmark = pytest.mark.unit


class FakeAllocator:
    page_size = PAGE

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free(self, free_index: np.ndarray, dp_rank: int = 0) -> None:
        self.freed += free_index.tolist()


class Scheduler(SchedulerDisaggregationPrefillMixin, FakeScheduler):  # type: ignore[misc]
    def __init__(self, *flags: str) -> None:
        FakeScheduler.__init__(self, "--disaggregation-mode", "prefill", *flags)
        self.token_to_kv_pool_allocator = FakeAllocator()
        self._guard = PageGuard(self.token_to_kv_pool_allocator)
        self._send_queue = self._create_send_queue()


class Abort:
    is_error = True

    def __init__(self, message: str, status: HTTPStatus | None) -> None:
        self.message, self.status_code = message, status


@pytest.fixture(autouse=True)
def finish_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sgl-jax there is no ``FINISH_ABORT``."""

    def fail(req: Any, message: str, status: HTTPStatus | None) -> None:
        req.finished_reason = Abort(message, status)

    monkeypatch.setattr(compat, "fail", fail)


def record(num_tokens: int = 39) -> PDRequest:
    return PDRequest(room=7, prompt=b"digest", num_tokens=num_tokens, bootstrap_addr=None)


def arrive(scheduler: Scheduler, rid: str = "a", num_tokens: int = 39) -> tuple[FakeRequest, FakeTransfer]:
    req = FakeRequest(rid, pd=record(num_tokens))
    scheduler._add_request_to_queue(req)
    return req, scheduler.kv_manager.made[-1]


def run(scheduler: Scheduler, req: FakeRequest, computed: int = 40) -> FakeBatch:
    """One forward, and its result."""
    req.kv_committed_len = computed
    batch = FakeBatch(req)
    scheduler.process_batch_result(batch, None)
    return batch


def finish(scheduler: Scheduler, req: FakeRequest) -> None:
    """sgl-jax finds the request finished and wants to answer."""
    req.finished_reason = SimpleNamespace(is_error=False)
    scheduler.stream_output([req], False, False)


def test_an_ordinary_request_is_left_alone() -> None:
    scheduler = Scheduler()
    req = FakeRequest("a")
    scheduler._add_request_to_queue(req)
    run(scheduler, req)
    finish(scheduler, req)
    assert scheduler.waiting_queue == [req]
    assert scheduler.streamed == [req]
    assert scheduler.kv_manager.made == []


def test_a_request_is_queued_and_announced_at_once() -> None:
    scheduler = Scheduler()
    req, sender = arrive(scheduler)
    assert scheduler.waiting_queue == [req]
    assert sender.created_with == (7, b"digest", 39)


def test_a_grammar_requests_road_leads_there_too() -> None:
    scheduler = Scheduler()
    scheduler._extend_requests_to_queue([FakeRequest("a", pd=record()), FakeRequest("b")])
    assert len(scheduler.waiting_queue) == 2
    assert len(scheduler.kv_manager.made) == 1


def test_a_retracted_request_is_not_announced_again() -> None:
    scheduler = Scheduler()
    req, _ = arrive(scheduler)
    scheduler._extend_requests_to_queue([req], is_retracted=True)
    assert len(scheduler.kv_manager.made) == 1
    assert scheduler.retracting == [True]


def test_pages_are_sent_when_the_last_chunk_has_run() -> None:
    scheduler = Scheduler()
    req, sender = arrive(scheduler)
    run(scheduler, req, computed=16)
    run(scheduler, req, computed=32)
    assert sender.pages is None
    run(scheduler, req, computed=40)
    # Three pages for 39 tokens, wherever the pool put them, the partial last one included.
    first = int(scheduler.req_to_token_pool.req_to_token[0, 0]) // PAGE
    assert sender.pages == [first, first + 1, first + 2]


def test_pages_are_sent_before_the_engine_can_free_them_and_only_once() -> None:
    scheduler = Scheduler()
    req, sender = arrive(scheduler)
    processed_before: list[int] = []

    def send(pages: list[int]) -> bool:
        processed_before.append(len(scheduler.processed))
        return True

    sender.send = send  # type: ignore[method-assign]
    run(scheduler, req)
    run(scheduler, req)
    assert processed_before == [0]
    assert len(scheduler.processed) == 2


def test_the_answer_waits_for_the_transfer() -> None:
    scheduler = Scheduler()
    req, sender = arrive(scheduler)
    run(scheduler, req)
    finish(scheduler, req)
    for state in (KVPoll.WaitingForInput, KVPoll.Transferring):
        sender.state = state
        scheduler._poll_transfers()
        assert scheduler.streamed == []
    assert scheduler._num_transfers() == 1
    sender.state = KVPoll.Success
    scheduler._poll_transfers()
    assert scheduler.streamed == [req]
    assert scheduler._num_transfers() == 0


def test_a_transfer_may_end_before_the_engine_has_answered() -> None:
    scheduler = Scheduler()
    req, sender = arrive(scheduler)
    sender.state = KVPoll.Success
    scheduler._poll_transfers()
    assert scheduler.streamed == []
    finish(scheduler, req)
    scheduler._poll_transfers()
    assert scheduler.streamed == [req]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_transfer_is_an_error_of_p_only_if_d_does_not_recompute(policy: str) -> None:
    scheduler = Scheduler("--disaggregation-failure-policy", policy)
    req, sender = arrive(scheduler)
    finish(scheduler, req)
    sender.fail("D is gone")
    scheduler._poll_transfers()
    assert scheduler.streamed == [req]
    assert req.finished_reason.is_error is (policy == "fail")
    if policy == "fail":
        assert req.finished_reason.status_code == HTTPStatus.BAD_GATEWAY
        assert "D is gone" in req.finished_reason.message


def test_what_sgl_jax_refuses_is_told_to_d() -> None:
    scheduler = Scheduler()
    req = FakeRequest("a", pd=record())
    req.to_finish = SimpleNamespace(message="too long")
    scheduler._add_request_to_queue(req)
    assert "too long" in scheduler.kv_manager.made[0].reason
    assert scheduler._num_transfers() == 0


@pytest.mark.parametrize("finished", [False, True])
def test_a_client_that_leaves_ends_the_transfer_at_once(finished: bool) -> None:
    scheduler = Scheduler()
    req, sender = arrive(scheduler)
    if finished:
        finish(scheduler, req)
    scheduler.abort_request(SimpleNamespace(rid="a", abort_all=False))
    assert sender.state is KVPoll.Failed
    assert scheduler._num_transfers() == 0
    # Held answers must go out, or the HTTP process would wait for them; others sgl-jax ends itself.
    assert scheduler.streamed == ([req] if finished else [])


def test_a_request_that_the_engine_aborts_is_answered_at_once() -> None:
    scheduler = Scheduler()
    req, sender = arrive(scheduler)
    req.finished_reason = Abort("out of memory", None)
    scheduler.stream_output([req], False, False)
    assert scheduler.streamed == [req]
    assert sender.state is KVPoll.Failed


def test_nothing_is_transferred_where_d_needs_every_logit() -> None:
    scheduler = Scheduler()
    req = FakeRequest("a", pd=record(num_tokens=0))
    scheduler._add_request_to_queue(req)
    finish(scheduler, req)
    assert scheduler.kv_manager.made == []
    assert scheduler.streamed == [req]


def test_pages_that_could_not_be_copied_yet_are_not_reused() -> None:
    scheduler = Scheduler()
    allocator = scheduler.token_to_kv_pool_allocator
    req, sender = arrive(scheduler)
    sender.released = False
    run(scheduler, req)
    assert sender.pages is not None
    locations = np.concatenate([np.arange(PAGE) + page * PAGE for page in sender.pages])
    other = np.arange(PAGE)
    allocator.free(np.concatenate((locations, other)))
    assert allocator.freed == other.tolist()
    assert scheduler._can_flush_cache()[0] is False
    scheduler._poll_transfers()
    assert allocator.freed == other.tolist()
    sender.released = True
    scheduler._poll_transfers()
    assert sorted(allocator.freed) == sorted([*other.tolist(), *locations.tolist()])
    allocator.free(other)
    assert allocator.freed[-PAGE:] == other.tolist()
