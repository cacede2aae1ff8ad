"""The HTTP process: what it adds to a request on its way in, and to an answer on its way out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sgl_pd_connector.sgl_jax import compat, tokenizer
from sgl_pd_connector.sgl_jax.requests import PDRequest, request_params
from sgl_pd_connector.sgl_jax.server_args import parse
from sgl_pd_connector.sgl_jax.tokenizer import DisaggregationTokenizerMixin

pytestmark = pytest.mark.unit

ROUTED = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 7}
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


class FakeTokenizerManager:
    """sgl-jax's, reduced to what the mixin calls. ``out`` is the next answer's ``meta_info``."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.out: dict[str, Any] = {"finish_reason": {"type": "length"}}
        self.params_seen: Any = None
        self.gracefully_exit = self.stopped = False

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        self.params_seen = request_params.get()
        yield "answer"

    def _create_tokenized_object(self, obj: Any, text: str, input_ids: list[int], mm: Any = None) -> Any:
        params = SimpleNamespace(max_new_tokens=50, min_new_tokens=9, **dict.fromkeys(GRAMMARS, "some"))
        logprobs = {"return_logprob": obj.return_logprob, "return_output_logprob_only": False}
        routed = {name: getattr(obj, name) for name in ROUTED}
        return SimpleNamespace(**routed, **logprobs, sampling_params=params)

    def _send_one_request(self, obj: Any, tokenized_obj: Any, created_time: Any = None) -> Any:
        return SimpleNamespace()

    async def _wait_one_response(self, obj: Any, state: Any, request: Any = None) -> AsyncIterator[Any]:
        yield {"meta_info": self.out}

    def _handle_abort_req(self, recv_obj: Any) -> None:
        self.rid_to_state[recv_obj.rid].told = True

    def shutdown(self) -> None:
        self.stopped = True


def manager(mode: str) -> Any:
    class Manager(DisaggregationTokenizerMixin, FakeTokenizerManager):  # type: ignore[misc]
        disaggregation = parse(["--disaggregation-mode", mode])[0]

    return Manager()


def request(**fields: Any) -> Any:
    defaults = {**ROUTED, "return_routed_experts": False, "return_logprob": True, "stream": False}
    obj = SimpleNamespace(
        **{**defaults, "logprob_start_len": None, "return_output_logprob_only": False, **fields}
    )
    obj.contains_mm_input = lambda: False
    return obj


def send(mode: str, obj: Any) -> tuple[Any, Any, Any]:
    tokenizer_manager = manager(mode)
    tokenized = tokenizer_manager._create_tokenized_object(obj, "", [1, 2, 3])
    return tokenizer_manager, tokenized, tokenizer_manager._send_one_request(obj, tokenized)


def answers(tokenizer_manager: Any, obj: Any, state: Any) -> list[Any]:
    async def collect() -> list[Any]:
        return [out async for out in tokenizer_manager._wait_one_response(obj, state)]

    return asyncio.run(collect())


def test_the_record_travels_with_the_request_and_the_room_does_not() -> None:
    _, tokenized, _ = send("decode", request())
    record = compat.take(tokenized)
    assert isinstance(record, PDRequest)
    assert (record.room, record.num_tokens, record.bootstrap_addr) == (7, 2, "127.0.0.1:9000")
    # sgl-jax does not match prefixes of requests with a room.
    assert tokenized.bootstrap_room is None
    assert compat.take(tokenized) is None


def test_d_runs_the_request_as_it_is() -> None:
    obj = request()
    _, tokenized, _ = send("decode", obj)
    assert tokenized.sampling_params.max_new_tokens == 50
    assert tokenized.sampling_params.regex == "some"
    assert tokenized.return_logprob
    assert obj.return_logprob


def test_p_runs_what_the_kv_needs() -> None:
    obj = request()
    _, tokenized, _ = send("prefill", obj)
    assert (tokenized.sampling_params.max_new_tokens, tokenized.sampling_params.min_new_tokens) == (1, 0)
    assert all(getattr(tokenized.sampling_params, name) is None for name in GRAMMARS)
    assert not tokenized.return_logprob
    assert not obj.return_logprob


def test_p_leaves_ordinary_requests_alone() -> None:
    obj = request(bootstrap_room=None)
    _, tokenized, _ = send("prefill", obj)
    assert tokenized.sampling_params.max_new_tokens == 50
    assert tokenized.return_logprob


def test_malformed_fields_are_a_value_error_which_sgl_jax_answers_with_400() -> None:
    with pytest.raises(ValueError, match="bootstrap_room"):
        send("decode", request(bootstrap_room="seven"))


def test_p_answers_with_the_lists_that_routers_look_for() -> None:
    obj = request()
    tokenizer_manager, _, state = send("prefill", obj)
    (out,) = answers(tokenizer_manager, obj, state)
    assert out["meta_info"]["input_token_logprobs"] == []
    assert out["meta_info"]["output_top_logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_d_adds_a_list_to_streams_only(stream: bool) -> None:
    obj = request(stream=stream)
    tokenizer_manager, _, state = send("decode", obj)
    tokenizer_manager.out["output_token_logprobs"] = [1]
    (out,) = answers(tokenizer_manager, obj, state)
    assert ("input_token_logprobs" in out["meta_info"]) is stream


@pytest.mark.parametrize("status", [502, 503])
def test_a_failure_is_an_http_error(status: int) -> None:
    obj = request()
    tokenizer_manager, _, state = send("decode", obj)
    tokenizer_manager.out = {"finish_reason": {"type": "abort", "status_code": status, "message": "why"}}
    with pytest.raises(HTTPException, match="why") as caught:
        answers(tokenizer_manager, obj, state)
    assert caught.value.status_code == status


def test_a_failure_in_a_stream_is_an_error_event() -> None:
    obj = request(stream=True)
    tokenizer_manager, _, state = send("decode", obj)
    tokenizer_manager.out = {"finish_reason": {"type": "abort", "status_code": 502, "message": "why"}}
    with pytest.raises(ValueError, match="why"):
        answers(tokenizer_manager, obj, state)


def test_an_abort_without_a_status_is_an_answer() -> None:
    obj = request()
    tokenizer_manager, _, state = send("decode", obj)
    tokenizer_manager.out = {"finish_reason": {"type": "abort", "status_code": None}}
    assert len(answers(tokenizer_manager, obj, state)) == 1


class Body:
    method = "POST"

    def __init__(self, body: Any) -> None:
        self._body = body

    async def json(self) -> Any:
        return self._body


@pytest.mark.parametrize(
    ("body", "expected"), [({"kv_transfer_params": {"a": 1}}, {"a": 1}), ({}, {}), ([], {}), (None, {})]
)
def test_kv_transfer_params_are_read_from_the_body(body: Any, expected: dict[str, Any]) -> None:
    tokenizer_manager = manager("decode")

    async def ask() -> list[Any]:
        http = None if body is None else Body(body)
        return [out async for out in tokenizer_manager.generate_request(request(), http)]

    assert asyncio.run(ask()) == ["answer"]
    assert tokenizer_manager.params_seen == expected


def test_requests_aborted_in_the_queue_are_forgotten() -> None:
    tokenizer_manager = manager("decode")
    state = SimpleNamespace()
    tokenizer_manager.rid_to_state["a"] = state
    for _ in range(2):
        tokenizer_manager._handle_abort_req(SimpleNamespace(rid="a"))
    assert state.told
    assert tokenizer_manager.rid_to_state == {}


@pytest.mark.parametrize("in_flight", [False, True])
def test_sigterm_drains_for_a_while_then_ends_everything(
    in_flight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(tokenizer, "DRAIN_SECONDS", 0.01)
    monkeypatch.setattr(tokenizer, "stop_children", lambda: ended.append("children"))
    monkeypatch.setattr(compat, "kill_process_tree", lambda include_self: ended.append("tree"))
    tokenizer_manager = manager("decode")
    tokenizer_manager.gracefully_exit = True
    if in_flight:
        tokenizer_manager.rid_to_state["a"] = SimpleNamespace()
    asyncio.run(tokenizer_manager.sigterm_watchdog())
    assert tokenizer_manager.stopped
    assert ended == ["children", "tree"]
