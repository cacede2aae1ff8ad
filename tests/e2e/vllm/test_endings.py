"""Requests that end before, beside or against the plan: each gets an answer, and nothing is left behind."""

from __future__ import annotations

import httpx
import pytest

from sgl_pd_connector.testing.servers import Server
from tests.e2e.vllm.conftest import LEASE, Pair, metric, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_client_that_leaves_frees_both_servers(pair: Pair, front: Server) -> None:
    body = {"model": pair.engine.model, "prompt": pair.fresh(300), "max_tokens": 600, "stream": True}
    with pair.client.stream("POST", front.url + "/v1/completions", json=body) as answer:
        assert answer.status_code == httpx.codes.OK
        next(answer.iter_lines())
    wait_for(lambda: metric(pair.decode, "num_requests_running") == 0, "D goes on for a client that left")


def test_a_client_that_leaves_d_before_p_was_asked_is_forgotten(pair: Pair) -> None:
    body = {"model": pair.engine.model, "prompt": pair.fresh(60), "max_tokens": 8, **pair.routed(11)}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(pair.decode.url + "/v1/completions", json=body, timeout=1.0)
    wait_for(lambda: metric(pair.decode, "num_requests_waiting") == 0, "D waits for a client that left")


def test_a_prefill_that_nobody_fetches_is_dropped_after_the_lease(pair: Pair) -> None:
    before = metric(pair.prefill, "sgl_pd_transfers_total", outcome="timeout")
    answer = pair.ask(pair.prefill, {"prompt": pair.fresh(60), "max_tokens": 50, **pair.routed(12)})
    assert answer["usage"]["completion_tokens"] == 1
    wait_for(
        lambda: metric(pair.prefill, "kv_cache_usage_perc") == 0, "P keeps the pages of what it copied", 5
    )

    def expired() -> bool:
        pair.tokens(pair.prefill, [65], 1)  # An idle engine reports nothing.
        return metric(pair.prefill, "sgl_pd_transfers_total", outcome="timeout") == before + 1

    wait_for(expired, "the copy does not expire", LEASE + 20)
    assert metric(pair.prefill, "sgl_pd_packed_bytes") == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bootstrap_room": "seven"}, "bootstrap_room"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"kv_transfer_params": {"do_remote_prefill": "yes"}}, "do_remote_prefill"),
    ],
)
def test_malformed_fields_are_answered_400_by_both(pair: Pair, fields: dict[str, object], named: str) -> None:
    body = {"prompt": pair.fresh(20), "max_tokens": 4, **pair.routed(13), **fields}
    for server in (pair.prefill, pair.decode):
        answer = pair.post(server, body)
        assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
        assert named in answer.text


def test_requests_for_the_other_server_are_answered_400(pair: Pair) -> None:
    body = {"prompt": pair.fresh(20), "max_tokens": 4}
    wrong = {
        pair.prefill.name: pair.post(
            pair.prefill, {**body, "kv_transfer_params": {"do_remote_prefill": True, **pair.routed(14)}}
        ),
        pair.decode.name: pair.post(pair.decode, {**body, "kv_transfer_params": {"do_remote_decode": True}}),
    }
    for answer in wrong.values():
        assert answer.status_code == httpx.codes.BAD_REQUEST, answer.text
        assert "swapped" in answer.text


def test_what_a_plain_server_refuses_is_refused_with_its_words(pair: Pair, front: Server) -> None:
    body = {"prompt": pair.fresh(2000), "max_tokens": 4}
    expected, got = pair.post(pair.plain, body), pair.post(front, body)
    assert got.status_code == expected.status_code == httpx.codes.BAD_REQUEST
    assert pair.tokens(front, pair.fresh(20)), "the next request is served"


def test_of_a_request_that_only_d_refuses_p_drops_its_copy_at_once(pair: Pair) -> None:
    body = {"prompt": pair.fresh(100), "max_tokens": 4, **pair.routed(14)}
    before = metric(pair.prefill, "sgl_pd_transfers_total", outcome="aborted")
    pair.ask(pair.prefill, body)
    refused = pair.post(pair.decode, {**body, "prompt": pair.fresh(2000)})
    assert refused.status_code == httpx.codes.BAD_REQUEST
    pair.assert_nothing_packed()
    assert metric(pair.prefill, "sgl_pd_transfers_total", outcome="aborted") == before + 1
