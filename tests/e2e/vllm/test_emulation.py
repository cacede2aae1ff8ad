"""Emulated vLLM answers with exactly the tokens of the NumPy reference, which shares no code with it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sgl_pd_connector.testing.engines import ENGINES, Engine
from sgl_pd_connector.testing.reference import Completion, ReferenceModel
from sgl_pd_connector.testing.servers import Fleet, Server, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS = 16
# Borders of pages (16 tokens), of compiled shapes (powers of two), and of prefill chunks (512 tokens).
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 255, 500, 511, 512, 513, 600, 1000)


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(1000 * seed + length)
    return [source.randrange(32, 127) for _ in range(length)]


class Client:
    """Asks the emulated server and the reference the same."""

    def __init__(self, engine: Engine, server: Server, http: httpx.Client) -> None:
        self._engine, self._http = engine, http
        self._url = server.url
        self.reference = ReferenceModel(Path(engine.model))

    def ask(self, ids: list[int]) -> list[int]:
        path, body = self._engine.request(ids, TOKENS)
        answer = self._http.post(self._url + path, json=body).raise_for_status()
        return self._engine.token_ids(answer.json())

    def expected(self, ids: list[int]) -> list[int]:
        completion: Completion = self.reference.greedy(ids, TOKENS)
        assert completion.margin > 1e-4, "too close to a tie to compare: choose another prompt"
        return completion.tokens

    def chat(self, text: str) -> str:
        body = {"model": self._engine.model, "max_tokens": TOKENS, "temperature": 0}
        body["messages"] = [{"role": "user", "content": text}]
        answer = self._http.post(self._url + "/v1/chat/completions", json=body).raise_for_status()
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    def prefix_cache_hits(self) -> int:
        lines = self._http.get(self._url + "/metrics").raise_for_status().text.splitlines()
        return sum(
            int(float(line.split()[-1])) for line in lines if line.startswith("vllm:prefix_cache_hits_total")
        )


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    engine = ENGINES["vllm"](None)
    if not engine.emulated:
        pytest.skip("this machine has a TPU")
    [port] = free_ports(1)
    with (
        Fleet() as fleet,
        httpx.Client(timeout=300, limits=httpx.Limits(max_keepalive_connections=0)) as http,
    ):
        server = engine.server("plain", port=port, directory=tmp_path_factory.mktemp("emulation"))
        fleet.start(server)
        fleet.wait_ready([server], timeout=300)
        yield Client(engine, server, http)


@pytest.mark.parametrize("length", LENGTHS)
def test_alone(client: Client, length: int) -> None:
    ids = prompt(length)
    assert client.ask(ids) == client.expected(ids)


def test_together(client: Client) -> None:
    """Prefills, chunks and decodes share steps, in changing company."""
    prompts = [prompt(length, seed) for seed in (1, 2, 3) for length in LENGTHS]
    random.Random(0).shuffle(prompts)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(client.ask, prompts))
    assert answers == [client.expected(ids) for ids in prompts]


@pytest.mark.parametrize("shared", [16, 160, 640])
def test_with_a_cached_prefix(client: Client, shared: int) -> None:
    prefix = prompt(shared, seed=4)
    client.ask([*prefix, *prompt(20, seed=5)])
    before = client.prefix_cache_hits()
    longer = [*prefix, *prompt(90, seed=6)]
    assert client.ask(longer) == client.expected(longer)
    assert client.prefix_cache_hits() - before == shared


def test_chat(client: Client) -> None:
    text = "Where does the KV cache go?"
    templated = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    special = {"<|im_start|>": 257, "<|im_end|>": 258}
    ids: list[int] = []
    while templated:
        token = next((name for name in special if templated.startswith(name)), templated[0])
        ids.append(special.get(token, ord(token[0])))
        templated = templated.removeprefix(token)
    assert client.chat(text) == bytes(client.expected(ids)).decode()
