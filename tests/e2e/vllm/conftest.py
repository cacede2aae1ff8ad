"""Real vLLM servers of one tiny model, started once: P, D, a plain one, and both kinds of router in front.

``pair`` is shared by all tests; after each of them every server must be idle, with all of its pages free.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from sgl_pd_connector.testing.engines import ENGINES, Engine
from sgl_pd_connector.testing.servers import Fleet, Server, free_ports, mini_lb, sequential_proxy

# test_scheduler.py runs parts of vLLM in this process.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

PAGE = 16
CHUNK = 128
"""Tokens of prefill per step: longer prompts are prefilled in chunks."""
LEASE = 10.0
START_SECONDS = 400.0
# A connection kept open between tests would look like one that a test leaks.
NO_KEEPALIVE = httpx.Limits(max_keepalive_connections=0)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds:g} s: {what}"
        time.sleep(0.05)


def prompt(seed: int, tokens: int) -> list[int]:
    """Printable ASCII, which is one token per byte; different for every seed."""
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(tokens)]


def metric(server: Server, name: str, **labels: str) -> float:
    """A value of the server's /metrics; 0 for a series that is not there."""
    for line in httpx.get(server.url + "/metrics", timeout=30).text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == f"vllm:{name}" and all(
            f'{k}="{v}"' in series for k, v in labels.items()
        ):
            return float(value)
    return 0.0


@dataclass
class Pair:
    """The shared servers.

    Attributes:
        seed: for a prompt that no test has used: `fresh`.
    """

    engine: Engine
    plain: Server
    prefill: Server
    decode: Server
    router: Server
    proxy: Server
    bootstrap_port: int
    client: httpx.Client
    seed: int = field(default=0, init=False)

    def fresh(self, tokens: int) -> list[int]:
        """A prompt that is in no server's prefix cache."""
        self.seed += 1
        return prompt(self.seed, tokens)

    def post(self, server: Server, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        return self.client.post(server.url + path, json={"model": self.engine.model, **body})

    def ask(self, server: Server, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        answer = self.post(server, {"temperature": 0, **body}, path)
        assert answer.status_code == httpx.codes.OK, answer.text
        return dict(answer.json())

    def tokens(self, server: Server, prompt: list[int], max_tokens: int = 8, **fields: Any) -> list[int]:
        body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **fields}
        return list(self.ask(server, body)["choices"][0]["token_ids"])

    def transfers(self, outcome: str = "ok") -> float:
        """Transfers that D has finished."""
        return metric(self.decode, "sgl_pd_transfers_total", outcome=outcome)

    def pages(self) -> float:
        """Pages that D has received."""
        return metric(self.decode, "sgl_pd_pages_total")

    def assert_nothing_packed(self) -> None:
        """P holds no copy, well before the lease would drop it."""

        def empty() -> bool:
            self.tokens(self.prefill, [65], 1)  # An idle engine reports nothing.
            return metric(self.prefill, "sgl_pd_packed_bytes") == 0

        wait_for(empty, "P keeps a copy that nobody wants", LEASE / 2)

    def routed(self, room: int, bootstrap_port: int | None = None) -> dict[str, Any]:
        """The fields that sglang's routers add."""
        port = self.bootstrap_port if bootstrap_port is None else bootstrap_port
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}

    def assert_idle(self) -> None:
        for server in (self.prefill, self.decode, self.plain):
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                wait_for(
                    lambda s=server, n=name: metric(s, n) == 0, f"{server.name}: {name} does not return to 0"
                )


@pytest.fixture(scope="session")
def engine() -> Engine:
    engine = ENGINES["vllm"](None)
    assert engine.page_size == PAGE
    flags = list(engine.extra_args)  # type: ignore[attr-defined]
    flags[flags.index("--max-num-batched-tokens") + 1] = str(CHUNK)
    engine.extra_args = [*flags, "--num-gpu-blocks-override", "400"]  # type: ignore[attr-defined]
    return engine


@pytest.fixture(scope="session")
def servers(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("servers")
    ports = free_ports(6)
    plain = engine.server("plain", port=ports[0], directory=directory)
    settings = {"bootstrap_port": ports[3], "lease": LEASE}
    prefill = engine.server("prefill", port=ports[1], directory=directory, settings=settings)
    decode = engine.server("decode", port=ports[2], directory=directory)
    router = mini_lb(prefill, ports[3], decode, port=ports[4], log=directory / "router.log")
    proxy = sequential_proxy(prefill, decode, port=ports[5], log=directory / "proxy.log")
    with Fleet() as fleet, httpx.Client(timeout=120, limits=NO_KEEPALIVE) as client:
        fleet.start(plain, prefill, decode, router, proxy)
        fleet.wait_ready([plain, prefill, decode, router, proxy], START_SECONDS)
        yield Pair(engine, plain, prefill, decode, router, proxy, ports[3], client)


@pytest.fixture
def pair(servers: Pair) -> Iterator[Pair]:
    yield servers
    servers.assert_idle()


@pytest.fixture(params=["router", "proxy"])
def front(request: pytest.FixtureRequest, pair: Pair) -> Server:
    """What clients talk to: sglang's router (P and D at once) or a sequential proxy (P, then D)."""
    return pair.router if request.param == "router" else pair.proxy
