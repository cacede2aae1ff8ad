"""What a request may ask for besides tokens. The reference is the same request as an ordinary one, on one server."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sgl_pd_connector.testing.servers import Server
from tests.e2e.sgl_jax.deployment import Deployment
from tests.e2e.sgl_jax.prompts import chat, completion, greedy, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LOGPROBS: dict[str, dict[str, Any]] = {
    "output": {"return_logprob": True},
    "top": {"return_logprob": True, "top_logprobs_num": 2},
    "whole prompt": {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
    "from a page": {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 16},
    "inside a page": {"return_logprob": True, "logprob_start_len": 21},
    "some tokens": {"return_logprob": True, "token_ids_logprob": [97, 98]},
}


def plain(value: Any) -> Any:
    """The logprobs of an answer, rounded: the two computations may differ in the last bits."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-3)
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


def logprobs(out: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in out["meta_info"].items() if "logprobs" in name}


@pytest.mark.parametrize("asked", LOGPROBS.values(), ids=LOGPROBS)
def test_logprobs(pair: Deployment, lb: Server, asked: dict[str, Any]) -> None:
    body = {"text": prompt(40, seed=20), "sampling_params": greedy(), **asked}
    expected = pair.answer(pair.prefill, "/generate", body)
    out = pair.answer(lb, "/generate", body)
    assert out["text"] == expected["text"]
    assert logprobs(out) == plain(logprobs(expected))


@pytest.mark.parametrize("asked", LOGPROBS.values(), ids=LOGPROBS)
def test_logprobs_in_a_stream(pair: Deployment, lb: Server, asked: dict[str, Any]) -> None:
    body = {"text": prompt(40, seed=21), "sampling_params": greedy(), **asked}
    expected = logprobs(pair.events(pair.prefill, "/generate", body)[-1])
    # mini_lb wants to join this list, so it is there even when nobody asked for it.
    expected.setdefault("input_token_logprobs", [])
    assert logprobs(pair.events(lb, "/generate", body)[-1]) == plain(expected)


def test_logprobs_of_openai_requests(pair: Deployment, router: Server) -> None:
    text = prompt(40, seed=22)
    for path, body in (
        ("/v1/completions", completion(text, logprobs=2)),
        ("/v1/completions", completion(text, logprobs=2, echo=True)),
        ("/v1/chat/completions", chat(text, logprobs=True, top_logprobs=2)),
    ):
        expected = pair.answer(pair.prefill, path, body)["choices"]
        assert pair.answer(router, path, body)["choices"] == plain(expected)


def test_constrained_requests(pair: Deployment, router: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = prompt(40, seed=23)
    out = pair.answer(router, "/generate", {"text": text, "sampling_params": greedy(regex="[a-f]{6}")})
    assert re.fullmatch("[a-f]{6}", out["text"])
    body = {"text": text, "sampling_params": greedy(60, json_schema=json.dumps(schema))}
    expected = pair.answer(pair.prefill, "/generate", body)
    assert pair.answer(router, "/generate", body)["text"] == expected["text"]


def test_one_new_token(pair: Deployment, router: Server) -> None:
    text = prompt(40, seed=24)
    out = pair.answer(router, "/generate", {"text": text, "sampling_params": greedy(1)})
    assert out["output_ids"] == pair.model.greedy(text, 1).tokens
    assert out["meta_info"]["completion_tokens"] == 1


def test_stop_tokens_and_strings(pair: Deployment, router: Server) -> None:
    text = prompt(40, seed=25)
    expected = pair.model.greedy(text, 20)
    token = expected.tokens[3]
    out = pair.answer(
        router, "/generate", {"text": text, "sampling_params": greedy(20, stop_token_ids=[token])}
    )
    # sgl-jax counts the token that stopped it, but does not show it.
    assert out["output_ids"] == expected.tokens[: expected.tokens.index(token)]
    assert out["meta_info"]["completion_tokens"] == expected.tokens.index(token) + 1
    assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    stop = expected.text[5:7]
    out = pair.answer(router, "/generate", {"text": text, "sampling_params": greedy(20, stop=[stop])})
    assert out["text"] == expected.text[: expected.text.index(stop)]


def test_the_first_token_ends_the_answer(pair: Deployment, router: Server) -> None:
    text = prompt(40, seed=26)
    (first,) = pair.model.greedy(text, 1).tokens
    params = greedy(20, stop_token_ids=[first])
    out = pair.answer(router, "/generate", {"text": text, "sampling_params": params})
    assert out["output_ids"] == []
    assert out["meta_info"]["completion_tokens"] == 1
    assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}


def test_a_minimum_of_new_tokens(pair: Deployment, lb: Server) -> None:
    text = prompt(40, seed=27)
    body = {"text": text, "sampling_params": greedy(20, min_new_tokens=10)}
    expected = pair.answer(pair.prefill, "/generate", body)
    assert pair.answer(lb, "/generate", body)["text"] == expected["text"]


def test_kinds_of_requests_share_a_batch(pair: Deployment, lb: Server) -> None:
    """Ordinary and disaggregated, constrained, with and without logprobs, long and short: all at once, on D."""
    kinds: list[tuple[Server, dict[str, Any], dict[str, Any]]] = [
        (lb, greedy(60), {}),
        (pair.decode, greedy(40), {}),
        (lb, greedy(10), {"return_logprob": True}),
        (lb, greedy(20), {"return_logprob": True, "top_logprobs_num": 2}),
        (lb, greedy(15), {"return_logprob": True, "logprob_start_len": 0}),
        (pair.decode, greedy(12), {"return_logprob": True}),
        (lb, greedy(30, regex="[a-f]{20}"), {}),
        (lb, greedy(25, n=2), {}),
        (lb, greedy(1), {}),
        (lb, greedy(30), {}),
    ]
    bodies = [
        {"text": prompt(20 + 9 * i, seed=28), "sampling_params": params, **fields}
        for i, (_, params, fields) in enumerate(kinds)
    ]
    expected = [pair.answer(pair.prefill, "/generate", body) for body in bodies]
    with ThreadPoolExecutor(len(kinds)) as threads:
        servers = [server for server, _, _ in kinds]
        got = list(threads.map(lambda server, body: pair.answer(server, "/generate", body), servers, bodies))

    def texts(out: Any) -> list[str]:
        return [each["text"] for each in (out if isinstance(out, list) else [out])]

    assert list(map(texts, got)) == list(map(texts, expected))
