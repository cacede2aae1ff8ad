"""Every kind of request, through both unmodified routers: the answer is that of the model, computed independently."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sgl_pd_connector.testing.servers import Server
from tests.e2e.sgl_jax.deployment import PAGE, Deployment
from tests.e2e.sgl_jax.prompts import chat, chat_prompt, completion, greedy, ids, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LENGTHS = sorted({1, 2, 100, 257} | {n * PAGE + d for n in (1, 2, 3) for d in (-1, 0, 1, 2)})


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_of_every_length_around_a_page(pair: Deployment, router: Server, length: int) -> None:
    text = prompt(length)
    out = pair.answer(router, "/generate", {"text": text, "sampling_params": greedy()})
    assert out["output_ids"] == pair.model.greedy(text, 8).tokens
    assert out["meta_info"]["prompt_tokens"] == length


def test_the_kv_is_received_not_recomputed(pair: Deployment, lb: Server) -> None:
    before = pair.state(pair.decode)["kv_transfers"]
    text = prompt(3 * PAGE + 1, seed=1)
    pair.answer(lb, "/generate", {"text": text, "sampling_params": greedy()})
    after = pair.state(pair.decode)["kv_transfers"]
    assert (after["ok"] - before["ok"], after["pages"] - before["pages"]) == (1, 3)
    # No length of prompt compiles anything of ours after the start.
    assert after["compilations"] == before["compilations"]
    # What D extends by is in its log: one token, padded to a page, on top of what it received.
    pair.wait_for_log(pair.decode, f"#new-token: {PAGE}, #cached-token: {3 * PAGE}")


def test_input_ids(pair: Deployment, router: Server) -> None:
    text = prompt(40, seed=2)
    out = pair.answer(router, "/generate", {"input_ids": ids(text), "sampling_params": greedy()})
    assert out["output_ids"] == pair.model.greedy(text, 8).tokens


def test_a_list_of_input_ids(pair: Deployment, router: Server) -> None:
    texts = [prompt(length, seed=3) for length in (5, 40, 33)]
    out = pair.answer(router, "/generate", {"input_ids": [*map(ids, texts)], "sampling_params": greedy()})
    assert [each["output_ids"] for each in out] == [pair.model.greedy(text, 8).tokens for text in texts]


def test_a_list_of_texts(pair: Deployment, lb: Server) -> None:
    # The Rust router answers 422 to this by itself.
    texts = [prompt(length, seed=4) for length in (5, 40, 33)]
    out = pair.answer(lb, "/generate", {"text": texts, "sampling_params": greedy()})
    assert [each["text"] for each in out] == [pair.model.greedy(text, 8).text for text in texts]


def test_completions(pair: Deployment, router: Server) -> None:
    text = prompt(40, seed=5)
    out = pair.answer(router, "/v1/completions", completion(text))
    assert out["choices"][0]["text"] == pair.model.greedy(text, 8).text
    assert out["usage"]["prompt_tokens"] == 40
    assert out["usage"]["completion_tokens"] == 8


def test_a_list_of_completions_in_one_room(pair: Deployment, router: Server) -> None:
    texts = [prompt(length, seed=6) for length in (40, 20, 40)] + [prompt(40, seed=6)]
    out = pair.answer(router, "/v1/completions", completion(texts))
    choices = sorted(out["choices"], key=lambda choice: choice["index"])
    assert [choice["text"] for choice in choices] == [pair.model.greedy(text, 8).text for text in texts]


def test_chat(pair: Deployment, router: Server) -> None:
    text = prompt(50, seed=7)
    out = pair.answer(router, "/v1/chat/completions", chat(text))
    assert out["choices"][0]["message"]["content"] == pair.model.greedy(chat_prompt(text), 8).text


def test_streams(pair: Deployment, router: Server) -> None:
    text = prompt(50, seed=8)
    expected = pair.model.greedy(text, 8).text
    native = pair.events(router, "/generate", {"text": text, "sampling_params": greedy()})
    assert native[-1]["text"] == expected
    assert len(native) == 8
    chunks = pair.events(router, "/v1/completions", completion(text))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    deltas = pair.events(router, "/v1/chat/completions", chat(text))
    said = "".join(delta["choices"][0]["delta"].get("content") or "" for delta in deltas)
    assert said == pair.model.greedy(chat_prompt(text), 8).text


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_several_samples_of_one_prompt(pair: Deployment, router: Server, path: str) -> None:
    text = prompt(40, seed=9)
    expected = pair.model.greedy(text, 8).text
    if path == "/generate":
        out = pair.answer(router, path, {"text": text, "sampling_params": greedy(n=3)})
        assert [sample["text"] for sample in out] == [expected] * 3
    else:
        out = pair.answer(router, path, completion(text, n=3))
        assert [choice["text"] for choice in out["choices"]] == [expected] * 3


def test_many_at_once(pair: Deployment, router: Server) -> None:
    texts = [prompt(10 + 7 * i, seed=10) for i in range(24)]

    def ask(text: str) -> str:
        return str(pair.answer(router, "/generate", {"text": text, "sampling_params": greedy()})["text"])

    with ThreadPoolExecutor(len(texts)) as threads:
        got = list(threads.map(ask, texts))
    assert got == [pair.model.greedy(text, 8).text for text in texts]


def test_ordinary_requests_are_served_by_both_servers(pair: Deployment) -> None:
    text = prompt(40, seed=11)
    for server in (pair.prefill, pair.decode):
        out = pair.answer(server, "/generate", {"text": text, "sampling_params": greedy()})
        assert out["output_ids"] == pair.model.greedy(text, 8).tokens
        assert pair.client.get(server.url + "/health_generate").status_code == 200


def test_kv_transfer_params_may_say_what_the_router_says(pair: Deployment) -> None:
    text = prompt(40, seed=12)
    body = {
        "text": text,
        "sampling_params": greedy(),
        "kv_transfer_params": {**pair.bootstrap, "bootstrap_room": 77},
    }
    with ThreadPoolExecutor(1) as threads:
        prefilled = threads.submit(pair.answer, pair.prefill, "/generate", body)
        out = pair.answer(pair.decode, "/generate", body)
    assert out["output_ids"] == pair.model.greedy(text, 8).tokens
    assert prefilled.result()["meta_info"]["completion_tokens"] == 1
