"""What a client gets through P and D is, token by token, what one plain server says."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sgl_pd_connector.testing.servers import Server
from tests.e2e.vllm.conftest import CHUNK, PAGE, Pair, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# Engines refuse several greedy samples; these are as greedy.
SAME_SAMPLES = {"temperature": 1.0, "top_k": 1}
LENGTHS = [1, 2, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 100]
CHUNKED = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, 500]


def essence(answer: dict[str, Any]) -> Any:
    """An answer without what differs from server to server and from request to request."""
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": answer["choices"], "usage": usage}


def assert_same(
    pair: Pair, front: Server, body: dict[str, Any], path: str = "/v1/completions"
) -> dict[str, Any]:
    """The same answer through the front as from a plain server; returned for further checks."""
    expected = pair.ask(pair.plain, body, path)
    got = pair.ask(front, body, path)
    assert rounded(essence(got)) == rounded(essence(expected))
    return got


def rounded(value: Any) -> Any:
    """Log-probabilities depend on the batch's shape in the last digits."""
    match value:
        case float():
            return pytest.approx(value, abs=2e-3)
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case list():
            return [rounded(item) for item in value]
    return value


@pytest.mark.parametrize("tokens", LENGTHS + CHUNKED)
def test_every_length_around_pages_and_chunks(pair: Pair, front: Server, tokens: int) -> None:
    before, pages = pair.transfers(), pair.pages()
    body = {"prompt": pair.fresh(tokens), "max_tokens": 8, "return_token_ids": True}
    assert_same(pair, front, body)
    wait_for(lambda: pair.transfers() == before + 1, "no transfer was counted")
    assert pair.pages() - pages == -(-tokens // PAGE)


def test_d_fetches_only_what_its_prefix_cache_lacks(pair: Pair, front: Server) -> None:
    shared = pair.fresh(5 * PAGE)
    assert pair.tokens(front, shared) == pair.tokens(pair.plain, shared)
    pages = pair.pages()
    longer = shared + pair.fresh(2 * PAGE + 3)
    assert pair.tokens(front, longer) == pair.tokens(pair.plain, longer)
    assert pair.pages() - pages == 3


def test_what_d_holds_is_not_fetched_and_p_forgets_it_at_once(pair: Pair, front: Server) -> None:
    prompt = pair.fresh(5 * PAGE)
    assert pair.tokens(front, prompt) == pair.tokens(pair.plain, prompt)
    pages = pair.pages()
    one_more = [*prompt, 65]
    assert pair.tokens(front, one_more) == pair.tokens(pair.plain, one_more)
    assert pair.pages() == pages
    pair.assert_nothing_packed()


def test_p_sends_pages_of_its_prefix_cache(pair: Pair, front: Server) -> None:
    shared = pair.fresh(5 * PAGE)
    pair.tokens(pair.prefill, shared)
    longer = shared + pair.fresh(7)
    pages = pair.pages()
    assert pair.tokens(front, longer) == pair.tokens(pair.plain, longer)
    assert pair.pages() - pages == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 24, "min_tokens": 24},
        {"max_tokens": 8, "logprobs": 3},
        {"max_tokens": 8, "n": 3, **SAME_SAMPLES},
        {"max_tokens": 8, "ignore_eos": True},
        {"max_tokens": 8, "logit_bias": {"258": 100}},
        {"max_tokens": 8, "echo": True},
        {"max_tokens": 8, "prompt_logprobs": 1},
        {},
    ],
    ids=str,
)
def test_sampling_fields(pair: Pair, front: Server, fields: dict[str, Any]) -> None:
    assert_same(pair, front, {"prompt": pair.fresh(70), "return_token_ids": True, **fields})


def test_a_first_token_that_ends_the_answer(pair: Pair, front: Server) -> None:
    prompt = pair.fresh(40)
    (first,) = pair.tokens(pair.plain, prompt, 1)
    for fields in ({"stop_token_ids": [first]}, {"stop": [chr(first)]}):
        got = assert_same(pair, front, {"prompt": prompt, "max_tokens": 8, **fields})
        assert got["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_in_the_middle(pair: Pair, front: Server) -> None:
    prompt = pair.fresh(40)
    tokens = pair.tokens(pair.plain, prompt, 12)
    stop = "".join(map(chr, tokens[4:6]))
    got = assert_same(pair, front, {"prompt": prompt, "max_tokens": 12, "stop": stop})
    assert got["choices"][0]["finish_reason"] == "stop"


def test_a_list_of_prompts(pair: Pair, front: Server) -> None:
    before = pair.transfers()
    prompts = [pair.fresh(tokens) for tokens in (5, PAGE, 40, 200)]
    got = assert_same(pair, front, {"prompt": prompts, "max_tokens": 8, "return_token_ids": True})
    assert len(got["choices"]) == 4
    wait_for(lambda: pair.transfers() == before + 4, "each prompt is a transfer")


def test_a_list_that_repeats_a_prompt_and_asks_for_samples(pair: Pair, front: Server) -> None:
    prompt = pair.fresh(40)
    body = {"prompt": [prompt, pair.fresh(20), prompt], "n": 2, "max_tokens": 8, **SAME_SAMPLES}
    got = assert_same(pair, front, {**body, "return_token_ids": True})
    assert len(got["choices"]) == 6


def test_text_prompts(pair: Pair, front: Server) -> None:
    assert_same(pair, front, {"prompt": "The quick brown fox jumps over the lazy dog.", "max_tokens": 8})


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 2, **SAME_SAMPLES},
        {"max_tokens": 1},
        {"stop": ["e", "a"]},
    ],
    ids=str,
)
def test_the_chat_endpoint(pair: Pair, front: Server, fields: dict[str, Any]) -> None:
    text = "".join(map(chr, pair.fresh(60)))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    assert_same(pair, front, {"messages": messages, "max_tokens": 8, **fields}, CHAT)


def events(pair: Pair, server: Server, body: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The parsed events of a streamed answer, which must end properly."""
    body = {"model": pair.engine.model, "temperature": 0, "stream": True, **body}
    with pair.client.stream("POST", server.url + path, json=body) as answer:
        assert answer.status_code == httpx.codes.OK
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("endpoint", ["/v1/completions", CHAT])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 2, **SAME_SAMPLES}, {"stream_options": {"include_usage": True}}], ids=str
)
def test_streaming(pair: Pair, front: Server, endpoint: str, fields: dict[str, Any]) -> None:
    prompt = pair.fresh(50)
    if endpoint == CHAT:
        content: dict[str, Any] = {"messages": [{"role": "user", "content": "".join(map(chr, prompt))}]}
    else:
        content = {"prompt": prompt}
    body = {**content, "max_tokens": 10, **fields}

    def streamed(server: Server) -> dict[int, tuple[str, Any]]:
        texts: dict[int, tuple[str, Any]] = {}
        for event in events(pair, server, body, endpoint):
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or "" if endpoint == CHAT else choice["text"]
                text, _ = texts.get(choice["index"], ("", None))
                texts[choice["index"]] = (text + piece, choice["finish_reason"])
        return texts

    expected = streamed(pair.plain)
    assert len(expected) == fields.get("n", 1)
    assert streamed(front) == expected


def test_many_requests_at_once(pair: Pair, front: Server) -> None:
    prompts = [pair.fresh(tokens) for tokens in range(3, 300, 19)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda prompt: pair.tokens(front, prompt, 12), prompts))
        expected = list(pool.map(lambda prompt: pair.tokens(pair.plain, prompt, 12), prompts))
    assert got == expected


def test_ordinary_requests_are_served_by_p_and_by_d(pair: Pair) -> None:
    before = pair.transfers()
    prompt = pair.fresh(60)
    expected = pair.tokens(pair.plain, prompt)
    assert pair.tokens(pair.prefill, prompt) == expected
    assert pair.tokens(pair.decode, prompt) == expected
    assert pair.transfers() == before
