"""Requests that end before, beside or against the plan: each gets an answer, and nothing is left behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import pytest

from sgl_pd_connector.testing.servers import Fleet, Server, free_ports
from tests.e2e.vllm.conftest import LEASE, START_SECONDS, Pair, metric, wait_for

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


class Doomed(NamedTuple):
    """A prefill server that will be killed, and a decode server that recomputes what it cannot get."""

    prefill: Server
    bootstrap_port: int
    recomputing: Server


@pytest.fixture
def doomed(pair: Pair, tmp_path: object) -> Iterator[Doomed]:
    directory = pair.decode.log.parent
    (directory / "doomed").mkdir()
    ports = free_ports(3)
    prefill = pair.engine.server(
        "prefill", port=ports[0], directory=directory / "doomed", settings={"bootstrap_port": ports[1]}
    )
    recomputing = pair.engine.server("decode", port=ports[2], directory=directory / "doomed")
    at = recomputing.command.index("--kv-transfer-config") + 1
    policy = ', "kv_load_failure_policy": "recompute"}'
    recomputing.command = [*recomputing.command]
    recomputing.command[at] = recomputing.command[at].removesuffix("}") + policy
    with Fleet() as fleet:
        fleet.start(prefill, recomputing)
        fleet.wait_ready([prefill, recomputing], START_SECONDS)
        yield Doomed(prefill, ports[1], recomputing)


def test_p_killed_while_d_waits(pair: Pair, doomed: Doomed) -> None:
    """By the policy: an error, or the right answer computed on D; and D serves on."""
    prompt = pair.fresh(100)
    expected = pair.tokens(pair.plain, prompt)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    body |= pair.routed(21, doomed.bootstrap_port)
    with ThreadPoolExecutor(2) as pool:
        # P is never asked, so both wait until it is dead.
        failing = pool.submit(pair.post, pair.decode, body)
        recomputed = pool.submit(pair.post, doomed.recomputing, body)
        for server in (pair.decode, doomed.recomputing):
            wait_for(lambda s=server: metric(s, "num_requests_waiting") == 1, f"{server.name} does not wait")
        doomed.prefill.signal(signal.SIGKILL)
        assert failing.result().status_code == httpx.codes.INTERNAL_SERVER_ERROR
        assert recomputed.result().status_code == httpx.codes.OK, recomputed.result().text
    assert recomputed.result().json()["choices"][0]["token_ids"] == expected
    again = pair.fresh(100)
    assert pair.tokens(pair.router, again) == pair.tokens(pair.plain, again)
