"""Requests of which one half is missing, refused or given up. The default policy is to recompute."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from sgl_pd_connector.testing.servers import Server
from tests.e2e.sgl_jax.deployment import POOL, Deployment
from tests.e2e.sgl_jax.prompts import greedy, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def body(text: str, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": greedy(tokens), **fields}


def test_a_prefill_that_no_decode_server_asks_for(pair: Deployment) -> None:
    out = pair.answer(
        pair.prefill, "/generate", body(prompt(40, seed=40), **pair.bootstrap, bootstrap_room=1)
    )
    assert out["meta_info"]["completion_tokens"] == 1
    assert "no decode instance has asked for it in" in pair.prefill.log.read_text()


def test_a_decode_without_its_prefill_is_recomputed(pair: Deployment) -> None:
    text = prompt(40, seed=41)
    out = pair.answer(pair.decode, "/generate", body(text, **pair.bootstrap, bootstrap_room=2))
    assert out["output_ids"] == pair.model.greedy(text, 8).tokens


def test_a_bootstrap_server_that_is_not_there(pair: Deployment) -> None:
    text = prompt(40, seed=42)
    nowhere = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 3}
    out = pair.answer(pair.decode, "/generate", body(text, **nowhere))
    assert out["output_ids"] == pair.model.greedy(text, 8).tokens


@pytest.mark.parametrize("length", [POOL - 5, POOL + 100])
def test_a_prompt_that_is_too_long_is_refused_by_both(pair: Deployment, router: Server, length: int) -> None:
    response = pair.post(router, "/generate", body(prompt(length)))
    assert response.status_code == 400, response.text
    assert "maximum allowed length" in response.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bootstrap_room": 4}, "bootstrap_host is missing"),
        ({"bootstrap_host": "127.0.0.1", "bootstrap_room": -1}, "bootstrap_room must be a whole number"),
        ({"bootstrap_host": "a b", "bootstrap_room": 4}, "bootstrap_host"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params must be an object"),
        (
            {"bootstrap_host": "127.0.0.1", "bootstrap_room": 4, "return_routed_experts": True},
            "return_routed_experts",
        ),
    ],
    ids=["no host", "bad room", "bad host", "bad parameters", "experts"],
)
def test_malformed_requests_are_refused_with_the_reason(
    pair: Deployment, fields: dict[str, Any], message: str
) -> None:
    response = pair.post(pair.decode, "/generate", body("hello", **fields))
    assert response.status_code == 400
    assert message in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_a_half_waiting(pair: Deployment, stream: bool) -> None:
    for room, server in enumerate((pair.prefill, pair.decode), start=5):
        waiting = body(prompt(40, seed=43), **pair.bootstrap, bootstrap_room=room, stream=stream)
        with pytest.raises(httpx.ReadTimeout):
            pair.post(server, "/generate", waiting, timeout=1.5)


def test_a_client_that_leaves_while_it_is_answered(pair: Deployment, lb: Server) -> None:
    endless = {
        "text": prompt(40, seed=44),
        "sampling_params": {**greedy(1500), "ignore_eos": True},
        "stream": True,
    }
    with pair.client.stream("POST", lb.url + "/generate", json=endless) as response:
        next(response.iter_lines())
    # mini_lb drops its connections when the client is gone; sgl-jax looks after the request two seconds later.
    pair.wait_settled()


def test_requests_go_on_after_all_that(pair: Deployment, router: Server) -> None:
    text = prompt(40, seed=45)
    deadline = time.monotonic() + 60
    while (response := pair.post(router, "/generate", body(text))).status_code != 200:
        # The Rust router keeps away from a server for a while that has answered with errors.
        assert response.status_code == 503, response.text
        assert time.monotonic() < deadline
        time.sleep(1.0)
    assert response.json()["output_ids"] == pair.model.greedy(text, 8).tokens
