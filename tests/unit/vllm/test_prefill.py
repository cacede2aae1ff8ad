"""P, both halves together: when a prompt is sent, which pages, and when they may be freed."""

from __future__ import annotations

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.vllm.scheduler import PrefillScheduler, transfer_of
from sgl_pd_connector.vllm.worker import PrefillWorker
from sgl_pd_connector.wire.params import DecodeParams, for_decode
from tests.unit.vllm.fakes import PAGE, Engine, FakeManager, request

pytestmark = pytest.mark.unit


@pytest.fixture
def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture
def engine(manager: FakeManager) -> Engine:
    return Engine(PrefillScheduler(PAGE, "10.0.0.1:8998"), PrefillWorker(manager))


def test_a_room_is_announced_on_arrival_before_any_prefill(engine: Engine, manager: FakeManager) -> None:
    engine.add(request("a", 10))
    engine.run()
    (sender,) = manager.senders
    room, prompt, num_tokens = sender.key
    assert (room, num_tokens) == (7, 10)
    assert len(prompt) == 16
    assert sender.pages is None


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (3, 1), (4, 1), (5, 2), (7, 2), (8, 2), (9, 3)])
def test_all_pages_of_a_prompt_are_sent_the_partial_last_one_included(
    engine: Engine, manager: FakeManager, tokens: int, pages: int
) -> None:
    engine.add(request("a", tokens))
    engine.run({"a": tokens}, {"a": [5, 9, 2, 8]})
    assert manager.senders[0].pages == [5, 9, 2, 8][:pages]


def test_a_chunked_prompt_is_sent_in_the_step_that_computes_its_last_token(
    engine: Engine, manager: FakeManager
) -> None:
    engine.add(request("a", 10))
    engine.run({"a": 6}, {"a": [1, 2]})
    engine.run({"a": 3}, {"a": [1, 2, 3]})
    assert manager.senders[0].pages is None
    engine.run({"a": 1}, {"a": [1, 2, 3]})
    assert manager.senders[0].pages == [1, 2, 3]


def test_cached_pages_are_sent_too(engine: Engine, manager: FakeManager) -> None:
    engine.add(request("a", 10, num_computed_tokens=8))
    engine.run({"a": 2}, {"a": [1, 2, 3]})
    assert manager.senders[0].pages == [1, 2, 3]


def test_a_finished_request_holds_its_pages_for_one_step(engine: Engine) -> None:
    engine.add(request("a", 4))
    engine.step({"a": 4}, {"a": [1]})
    engine.finish("a")
    engine.settle()
    assert engine.freed == []
    engine.run()
    assert engine.freed == ["a"]


def test_pages_are_freed_at_once_when_the_copy_was_reported_before_the_end(engine: Engine) -> None:
    engine.add(request("a", 4))
    engine.run({"a": 4}, {"a": [1]})
    engine.finish("a")
    assert engine.freed == ["a"]
    assert engine.run().finished_sending == set()


def test_pages_stay_until_a_send_that_waits_for_room_was_copied(engine: Engine, manager: FakeManager) -> None:
    engine.add(request("a", 4))
    engine.run()
    manager.senders[0].has_room = False
    engine.step({"a": 4}, {"a": [1]})
    engine.finish("a")
    engine.settle()
    for _ in range(3):
        engine.run()
    assert engine.freed == []
    manager.senders[0].has_room = True
    engine.run()
    assert engine.freed == ["a"]
    assert engine.run().finished_sending == set()


def test_a_copy_taken_by_d_leaves_nothing_behind(engine: Engine, manager: FakeManager) -> None:
    engine.add(request("a", 4))
    engine.run({"a": 4}, {"a": [1]})
    engine.finish("a")
    manager.senders[0].state = KVPoll.Success
    engine.run()
    assert engine.worker._sends == {}  # type: ignore[attr-defined]
    assert engine.scheduler._deliveries == {}  # type: ignore[attr-defined]


def test_a_prefill_that_never_completes_is_aborted_so_that_d_hears_of_it(
    engine: Engine, manager: FakeManager
) -> None:
    engine.add(request("a", 10))
    engine.run({"a": 6}, {"a": [1, 2]})
    engine.finish("a", "FINISHED_ABORTED")
    engine.run()
    assert manager.senders[0].aborted == "prefill did not complete: finished_aborted"
    assert engine.freed == ["a"]


def test_a_request_rejected_on_arrival_is_announced_and_aborted_in_one_step(
    engine: Engine, manager: FakeManager
) -> None:
    engine.add(request("a", 1))
    engine.finish("a", "FINISHED_ABORTED")
    engine.run()
    assert manager.senders[0].aborted


def test_a_client_that_leaves_after_prefill_does_not_take_the_copy_along(
    engine: Engine, manager: FakeManager
) -> None:
    engine.add(request("a", 4))
    engine.run({"a": 4}, {"a": [1]})
    engine.finish("a", "FINISHED_ABORTED")
    engine.run()
    assert manager.senders[0].aborted is None


def test_preemption_before_the_last_chunk_changes_nothing(engine: Engine, manager: FakeManager) -> None:
    chunked = engine.add(request("a", 10))
    engine.run({"a": 6}, {"a": [1, 2]})
    chunked.num_computed_tokens = 0
    engine.run(preempted=["a"])
    engine.run({"a": 10}, {"a": [7, 8, 9]})
    assert manager.senders[0].aborted is None
    assert manager.senders[0].pages == [7, 8, 9]


def test_preemption_after_the_copy_keeps_the_copy(engine: Engine, manager: FakeManager) -> None:
    preempted = engine.add(request("a", 4))
    engine.step({"a": 4}, {"a": [1]})
    # Asynchronous scheduling: the next step is scheduled before this one's report is read.
    earlier = engine.result
    preempted.num_computed_tokens = 0
    engine.step(preempted=["a"])
    engine.scheduler.update(earlier.metadata, set())
    engine.settle()
    assert manager.senders[0].aborted is None
    engine.run({"a": 4}, {"a": [3]})
    assert manager.senders[0].pages == [1]


def test_preemption_before_the_copy_fails_the_transfer_before_the_pages_are_read_again(
    engine: Engine, manager: FakeManager
) -> None:
    preempted = engine.add(request("a", 4))
    engine.run()
    manager.senders[0].has_room = False
    engine.run({"a": 4}, {"a": [1]})
    preempted.num_computed_tokens = 0
    engine.run(preempted=["a"])
    assert manager.senders[0].aborted
    engine.step({"a": 4}, {"a": [3]})
    engine.finish("a")
    engine.settle()
    engine.run()
    assert engine.freed == ["a"]


def test_a_sequential_proxy_is_answered_with_what_d_needs(engine: Engine, manager: FakeManager) -> None:
    engine.add(request("a", 4, kv_transfer_params={"do_remote_decode": True}))
    engine.run({"a": 4}, {"a": [1]})
    room = manager.senders[0].key[0]
    assert for_decode(engine.finish("a")) == DecodeParams(room, "10.0.0.1:8998")


def test_a_concurrent_router_is_answered_as_by_any_server(engine: Engine) -> None:
    engine.add(request("a", 4))
    engine.run({"a": 4}, {"a": [1]})
    assert engine.finish("a") is None


def test_p_computes_one_token_only(engine: Engine) -> None:
    assert engine.add(request("a", 4)).max_tokens == 1


def test_ordinary_requests_are_left_alone(engine: Engine, manager: FakeManager) -> None:
    ordinary = engine.add(request("a", 4, kv_transfer_params=None))
    assert engine.scheduler.matched_tokens(ordinary, 0) == (0, False)
    engine.run({"a": 4}, {"a": [1]})
    assert ordinary.max_tokens == 16
    assert engine.finish("a") is None
    assert manager.senders == []
    assert engine.freed == ["a"]


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"bootstrap_room": "seven"}},
        {"kv_transfer_params": {"do_remote_prefill": True, "bootstrap_room": 7}},
        {"prompt_token_ids": None},
    ],
)
def test_what_cannot_be_transferred_is_served_and_logged(
    engine: Engine, manager: FakeManager, caplog: pytest.LogCaptureFixture, fields: dict[str, object]
) -> None:
    engine.add(request("a", 4, **fields))
    engine.run({"a": 4}, {"a": [1]})
    engine.finish("a")
    assert manager.senders == []
    assert "request a is served without a transfer" in caplog.text


def test_an_error_in_one_transfer_ends_that_transfer_only(
    engine: Engine, manager: FakeManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.add(request("a", 4))
    engine.add(request("b", 4))
    engine.run()
    monkeypatch.setattr(manager.senders[0], "send", lambda pages: 1 / 0)
    engine.step({"a": 4, "b": 4}, {"a": [1], "b": [2]})
    engine.finish("a")
    engine.finish("b")
    engine.settle()
    engine.run()
    assert sorted(engine.freed) == ["a", "b"]
    assert manager.senders[0].aborted == "internal error, see the log of the prefill server"
    assert manager.senders[1].pages == [2]
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_broken_manager_does_not_hold_pages(engine: Engine, manager: FakeManager) -> None:
    engine.add(request("a", 4))
    manager.broken = True
    engine.step({"a": 4}, {"a": [1]})
    engine.finish("a")
    engine.settle()
    engine.run()
    assert engine.freed == ["a"]
    assert manager.senders[0].aborted


def test_what_changes_the_cache_changes_the_digest() -> None:
    plain = transfer_of(request("a", 4), 1)
    assert plain.prompt == transfer_of(request("b", 4), 1).prompt
    lora = type("Lora", (), {"lora_name": "tuned"})()
    image = type("Image", (), {"identifier": "cafe"})()
    others = [
        transfer_of(request("a", 5), 1),
        transfer_of(request("a", 4, lora_request=lora), 1),
        transfer_of(request("a", 4, cache_salt="tenant"), 1),
        transfer_of(request("a", 4, mm_features=[image]), 1),
    ]
    assert len({plain.prompt, *(other.prompt for other in others)}) == 5
