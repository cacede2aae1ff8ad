"""What a request's fields mean on either server."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_pd_connector.errors import RequestError
from sgl_pd_connector.sgl_jax.requests import read, request_params, transferred_tokens
from sgl_pd_connector.sgl_jax.server_args import parse
from sgl_pd_connector.wire.rooms import prompt_digest

pytestmark = pytest.mark.unit

PREFILL = parse(["--disaggregation-mode", "prefill"])[0]
DECODE = parse(["--disaggregation-mode", "decode"])[0]
ROUTED = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 7}
PROMPT = list(range(40))


def request(**fields: Any) -> Any:
    absent = dict.fromkeys((*ROUTED, "return_routed_experts", "return_logprob", "logprob_start_len"))
    return SimpleNamespace(**{**absent, "contains_mm_input": lambda: False, **fields})


@pytest.fixture
def params() -> Iterator[dict[str, Any]]:
    """``kv_transfer_params`` of the HTTP request."""
    found: dict[str, Any] = {}
    token = request_params.set(found)
    yield found
    request_params.reset(token)


def test_without_a_room_a_request_is_ordinary() -> None:
    assert read(PREFILL, request(), PROMPT) is None
    assert read(DECODE, request(), PROMPT) is None


def test_both_servers_read_the_same_from_one_body() -> None:
    prefill, decode = read(PREFILL, request(**ROUTED), PROMPT), read(DECODE, request(**ROUTED), PROMPT)
    assert prefill is not None
    assert decode is not None
    assert (prefill.room, prefill.prompt, prefill.num_tokens) == (7, prompt_digest(PROMPT), 39)
    assert (decode.room, decode.prompt, decode.num_tokens) == (7, prompt_digest(PROMPT), 39)
    assert decode.bootstrap_addr == "127.0.0.1:9000"


def test_a_record_travels_between_processes() -> None:
    record = read(DECODE, request(**ROUTED), PROMPT)
    assert pickle.loads(pickle.dumps(record)) == record


def test_the_port_of_the_bootstrap_server_has_a_default() -> None:
    record = read(DECODE, request(**{**ROUTED, "bootstrap_port": None}), PROMPT)
    assert record is not None
    assert record.bootstrap_addr == "127.0.0.1:8998"


def test_kv_transfer_params_are_carried_and_may_say_the_same(params: dict[str, Any]) -> None:
    params.update(ROUTED, note="x")
    record = read(DECODE, request(), PROMPT)
    assert record is not None
    assert (record.room, record.bootstrap_addr) == (7, "127.0.0.1:9000")
    assert record.kv_transfer_params["note"] == "x"


def test_what_the_router_says_outranks_kv_transfer_params(params: dict[str, Any]) -> None:
    params.update(bootstrap_room=1, bootstrap_host="127.0.0.9")
    record = read(DECODE, request(**ROUTED), PROMPT)
    assert record is not None
    assert (record.room, record.bootstrap_addr) == (7, "127.0.0.1:9000")


def test_a_decode_server_must_know_where_p_is() -> None:
    with pytest.raises(RequestError, match="bootstrap_host is missing"):
        read(DECODE, request(bootstrap_room=7), PROMPT)
    flags = ["--disaggregation-mode", "decode", "--disaggregation-bootstrap-host", "127.0.0.3"]
    record = read(parse(flags)[0], request(bootstrap_room=7), PROMPT)
    assert record is not None
    assert record.bootstrap_addr == "127.0.0.3:8998"


def test_sequential_proxies_are_refused(params: dict[str, Any]) -> None:
    params.update(do_remote_decode=True)
    with pytest.raises(RequestError, match="bootstrap_room is missing"):
        read(PREFILL, request(), PROMPT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"return_routed_experts": True}, "experts"), ({"contains_mm_input": lambda: True}, "images")],
)
def test_what_cannot_be_right_is_refused_by_both(fields: dict[str, Any], message: str) -> None:
    for args in (PREFILL, DECODE):
        with pytest.raises(RequestError, match=message):
            read(args, request(**ROUTED, **fields), PROMPT)


def test_token_ids_out_of_range_are_refused() -> None:
    with pytest.raises(RequestError, match="input_ids"):
        read(DECODE, request(**ROUTED), [1, -1])


@pytest.mark.parametrize(
    ("length", "logprob_start", "expected"),
    [
        (40, None, 39),
        (40, -1, 39),
        (40, 0, 0),
        (40, 20, 20),
        (40, 39, 39),
        (40, 60, 39),
        (1, None, 0),
        (17, None, 16),
    ],
)
def test_all_is_transferred_but_what_d_needs_logits_of(
    length: int, logprob_start: int | None, expected: int
) -> None:
    assert transferred_tokens(length, logprob_start) == expected


def test_logprobs_of_the_prompt_shorten_what_is_transferred_only_when_asked_for() -> None:
    asked = read(DECODE, request(**ROUTED, return_logprob=True, logprob_start_len=20), PROMPT)
    ignored = read(DECODE, request(**ROUTED, return_logprob=False, logprob_start_len=20), PROMPT)
    assert asked is not None
    assert ignored is not None
    assert (asked.num_tokens, ignored.num_tokens) == (20, 39)
