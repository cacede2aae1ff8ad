"""D, both halves together: when pages are allocated, which are loaded, and how every failure reaches vLLM."""

from __future__ import annotations

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.vllm.scheduler import DecodeScheduler
from sgl_pd_connector.vllm.worker import DecodeWorker
from tests.unit.vllm.fakes import PAGE, Engine, FakeManager, request

pytestmark = pytest.mark.unit

ASK_AGAIN = (None, False)
PREFILL_HERE = (0, False)


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture(params=["fail", "recompute"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(manager: FakeManager, policy: str) -> Engine:
    return Engine(
        DecodeScheduler(PAGE, None, recompute_failures=policy == "recompute"), DecodeWorker(manager)
    )


def ready(engine: Engine, manager: FakeManager, name: str = "a", tokens: int = 10) -> object:
    """A request whose KV waits on P."""
    new = engine.add(request(name, tokens))
    engine.run()
    manager.receivers[-1].state = KVPoll.WaitingForInput
    engine.run()
    return new


def load(engine: Engine, manager: FakeManager, tokens: int = 10) -> object:
    """A request whose pages are being written."""
    new = ready(engine, manager, tokens=tokens)
    engine.scheduler.allocated(new, [5, 6, 7, 8, 9], tokens)
    engine.run()
    return new


def test_the_prompt_is_asked_for_on_arrival(engine: Engine, manager: FakeManager) -> None:
    engine.add(request("a", 10))
    engine.run()
    (receiver,) = manager.receivers
    assert receiver.key[0] == 7
    assert receiver.key[2] == 10
    assert receiver.address == "127.0.0.1:8998"


def test_of_a_request_that_the_http_server_refused_p_is_told(engine: Engine, manager: FakeManager) -> None:
    engine.add(request("a", 1, abort_immediately=True))
    engine.finish("a", "FINISHED_ABORTED")
    engine.run()
    assert manager.refused == [(7, "127.0.0.1:8998")]
    assert manager.receivers == []
    engine.run()
    assert len(manager.refused) == 1


def test_no_page_is_allocated_before_p_is_ready(engine: Engine, manager: FakeManager) -> None:
    new = engine.add(request("a", 10))
    assert engine.scheduler.matched_tokens(new, 0) == ASK_AGAIN
    engine.run()
    assert engine.scheduler.matched_tokens(new, 0) == ASK_AGAIN
    manager.receivers[0].state = KVPoll.WaitingForInput
    engine.run()
    assert engine.scheduler.matched_tokens(new, 0) == (10, True)


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_the_whole_prompt_is_loaded(engine: Engine, manager: FakeManager, tokens: int, pages: int) -> None:
    new = ready(engine, manager, tokens=tokens)
    assert engine.scheduler.matched_tokens(new, 0) == (tokens, True)
    engine.scheduler.allocated(new, [5, 6, 7, 8][:pages], tokens)
    engine.run()
    assert manager.receivers[0].pages == [5, 6, 7, 8][:pages]
    assert manager.receivers[0].skipped == 0


def test_pages_in_the_local_cache_are_not_loaded(engine: Engine, manager: FakeManager) -> None:
    new = ready(engine, manager, tokens=10)
    assert engine.scheduler.matched_tokens(new, 4) == (6, True)
    engine.scheduler.allocated(new, [5, 6, 7], 6)
    engine.run()
    assert manager.receivers[0].pages == [6, 7]
    assert manager.receivers[0].skipped == 1


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_prompt_the_local_cache_holds_up_to_the_last_token_is_not_loaded_and_p_is_told(
    engine: Engine, manager: FakeManager, is_ready: bool
) -> None:
    new = ready(engine, manager, tokens=9) if is_ready else engine.add(request("a", 9))
    assert engine.scheduler.matched_tokens(new, 8) == PREFILL_HERE
    engine.scheduler.allocated(new, [5, 6, 7], 0)
    engine.run()
    assert manager.receivers[0].aborted == "the decode server does not need the KV"
    assert engine.result.finished_recving == set()


def test_a_request_for_which_vllm_refuses_external_kv_is_served_and_p_is_told(
    engine: Engine, manager: FakeManager
) -> None:
    """``skip_reading_prefix_cache`` (prompt logprobs): vLLM overrides whatever was matched with 0."""
    new = ready(engine, manager)
    engine.scheduler.matched_tokens(new, 0)
    engine.scheduler.allocated(new, [5, 6, 7], 0)
    engine.run()
    assert manager.receivers[0].aborted


def test_a_failed_allocation_is_tried_again(engine: Engine, manager: FakeManager) -> None:
    new = ready(engine, manager)
    for _ in range(3):
        assert engine.scheduler.matched_tokens(new, 0) == (10, True)
        engine.run()
    assert manager.receivers[0].pages is None


def test_success_is_reported_once_and_leaves_nothing_behind(engine: Engine, manager: FakeManager) -> None:
    new = load(engine, manager)
    assert engine.run().finished_recving == set()
    manager.receivers[0].state = KVPoll.Success
    result = engine.run()
    assert result.finished_recving == {"a"}
    assert result.failed_recving == set()
    assert engine.run().finished_recving == set()
    engine.scheduler.allocated(new, [5, 6, 7], 0)
    engine.finish("a", "FINISHED_STOPPED")
    assert engine.run().finished_recving == set()
    assert engine.freed == ["a"]
    assert manager.receivers[0].aborted is None
    assert engine.scheduler._phases == {}  # type: ignore[attr-defined]
    assert engine.worker._receivers == {}  # type: ignore[attr-defined]


def test_after_a_load_everything_is_local(engine: Engine, manager: FakeManager) -> None:
    """Preempted and scheduled anew: P's copy is used once."""
    new = load(engine, manager)
    manager.receivers[0].state = KVPoll.Success
    engine.run()
    assert engine.scheduler.matched_tokens(new, 0) == PREFILL_HERE
    assert engine.scheduler.matched_tokens(new, 4) == PREFILL_HERE


def test_a_failure_during_the_load_takes_vllms_road(
    engine: Engine, manager: FakeManager, policy: str
) -> None:
    new = load(engine, manager)
    manager.receivers[0].state = KVPoll.Failed
    result = engine.step()
    assert result.failed_recving == result.finished_recving == {"a"}
    if policy == "fail":
        engine.finish("a", "FINISHED_ERROR", loading=True)
    engine.settle()
    if policy == "recompute":
        assert engine.scheduler.matched_tokens(new, 0) == PREFILL_HERE
        engine.finish("a")
    assert engine.run().finished_recving == set()
    assert engine.freed == ["a"]


def test_a_failure_before_the_load_follows_the_policy(
    engine: Engine, manager: FakeManager, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    new = engine.add(request("a", 10))
    engine.run()
    manager.receivers[0].state = KVPoll.Failed
    engine.run()
    assert "request a" in caplog.text
    assert "peer said no" in caplog.text
    if policy == "recompute":
        assert engine.scheduler.matched_tokens(new, 0) == PREFILL_HERE
        engine.scheduler.allocated(new, [5, 6, 7], 0)
        assert engine.run().finished_recving == set()
    else:
        assert engine.scheduler.matched_tokens(new, 0) == (10, True)
        engine.scheduler.allocated(new, [5, 6, 7], 10)
        result = engine.step()
        assert result.failed_recving == result.finished_recving == {"a"}
        engine.finish("a", "FINISHED_ERROR", loading=True)
        engine.settle()
        assert engine.freed == ["a"]
    assert manager.receivers[0].pages is None


def test_a_failure_between_ready_and_allocation_ends_as_a_failed_load(
    engine: Engine, manager: FakeManager
) -> None:
    new = ready(engine, manager)
    engine.scheduler.allocated(new, [5, 6, 7], 10)
    manager.receivers[0].state = KVPoll.Failed
    result = engine.run()
    assert result.failed_recving == result.finished_recving == {"a"}
    assert manager.receivers[0].pages is None


@pytest.mark.parametrize("is_ready", [False, True])
def test_an_abort_before_allocation_tells_p(engine: Engine, manager: FakeManager, is_ready: bool) -> None:
    if is_ready:
        ready(engine, manager)
    else:
        engine.add(request("a", 10))
    engine.finish("a", "FINISHED_ABORTED")
    assert engine.run().finished_recving == set()
    assert manager.receivers[0].aborted == "request ended on the decode server: finished_aborted"
    assert engine.freed == ["a"]


def test_an_abort_during_the_load_frees_the_pages_only_after_the_writes_were_stopped(
    engine: Engine, manager: FakeManager
) -> None:
    load(engine, manager)
    engine.finish("a", "FINISHED_ABORTED", loading=True)
    assert engine.freed == []
    engine.run()
    assert manager.receivers[0].aborted
    assert engine.freed == ["a"]
    assert engine.run().finished_recving == set()


def test_an_abort_that_crosses_the_report_is_reported_once(engine: Engine, manager: FakeManager) -> None:
    load(engine, manager)
    manager.receivers[0].state = KVPoll.Success
    assert engine.step().finished_recving == {"a"}
    engine.finish("a", "FINISHED_ABORTED", loading=True)
    engine.settle()
    assert engine.freed == ["a"]
    assert engine.run().finished_recving == set()


def test_an_abort_that_crosses_the_order_to_load(engine: Engine, manager: FakeManager) -> None:
    new = ready(engine, manager)
    engine.scheduler.allocated(new, [5, 6, 7], 10)
    engine.step()
    engine.finish("a", "FINISHED_ABORTED", loading=True)
    engine.settle()
    engine.run()
    assert manager.receivers[0].aborted
    assert engine.freed == ["a"]


def test_an_error_in_one_transfer_fails_that_transfer_only(
    engine: Engine, manager: FakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ready(engine, manager, "a")
    second = ready(engine, manager, "b")
    monkeypatch.setattr(manager.receivers[0], "receive", lambda pages, skip: 1 / 0)
    engine.scheduler.allocated(first, [1, 2, 3], 10)
    engine.scheduler.allocated(second, [4, 5, 6], 10)
    result = engine.run()
    assert result.failed_recving == result.finished_recving == {"a"}
    assert manager.receivers[0].aborted == "internal error, see the log of the decode server"
    assert manager.receivers[1].pages == [4, 5, 6]


def test_a_broken_manager_fails_what_is_under_way(engine: Engine, manager: FakeManager) -> None:
    load(engine, manager)
    manager.broken = True
    result = engine.run()
    assert result.failed_recving == result.finished_recving == {"a"}
    assert manager.receivers[0].aborted


def test_ordinary_requests_are_left_alone(engine: Engine, manager: FakeManager) -> None:
    new = engine.add(request("a", 10, kv_transfer_params=None))
    assert engine.scheduler.matched_tokens(new, 0) == PREFILL_HERE
    engine.scheduler.allocated(new, [1, 2, 3], 0)
    engine.run({"a": 10})
    engine.finish("a")
    assert engine.run().finished_recving == set()
    assert manager.receivers == []


def test_without_an_address_the_request_is_served_here_and_the_remedy_logged(
    engine: Engine, manager: FakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    new = engine.add(request("a", 10, kv_transfer_params={"bootstrap_room": 7}))
    assert engine.scheduler.matched_tokens(new, 0) == PREFILL_HERE
    engine.run()
    assert manager.receivers == []
    assert "give the router the bootstrap port" in caplog.text


def test_the_servers_own_address_stands_in(manager: FakeManager) -> None:
    scheduler = DecodeScheduler(PAGE, "10.0.0.1:7080", recompute_failures=False)
    engine = Engine(scheduler, DecodeWorker(manager))
    engine.add(request("a", 10, kv_transfer_params={"bootstrap_room": 7}))
    engine.run()
    assert manager.receivers[0].address == "10.0.0.1:7080"
