"""A prefill server, a decode server and both of sglang's routers, and what the tests ask of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from sgl_pd_connector.testing.checkpoints import make_checkpoint
from sgl_pd_connector.testing.engines import ENGINES, FailurePolicy, SglJaxEngine
from sgl_pd_connector.testing.reference import ReferenceModel
from sgl_pd_connector.testing.servers import Fleet, Server, free_ports, mini_lb, rust_router

PAGE = 16
POOL = 4096
START_SECONDS = 400.0
REQUEST_SECONDS = 180.0
SETTLE_SECONDS = 30.0

# Short, so that the tests of a missing half end soon.
SETTINGS: dict[str, Any] = {"lease": 12.0, "bootstrap_timeout": 8.0}


def engine(
    *extra_args: str,
    environment: Mapping[str, str] | None = None,
    overlap: bool = False,
    page_size: int = PAGE,
    failure_policy: FailurePolicy = "recompute",
) -> SglJaxEngine:
    """sgl-jax with a tiny random model, and further flags."""
    made = ENGINES["sgl-jax"](None)
    assert isinstance(made, SglJaxEngine)
    return replace(
        made,
        overlap=overlap,
        page_size=page_size,
        failure_policy=failure_policy,
        extra_args=[*made.extra_args, *extra_args],
        environment={**made.environment, **(environment or {})},
    )


@dataclass(frozen=True)
class Deployment:
    """Running servers."""

    prefill: Server
    decode: Server
    routers: Mapping[str, Server]
    bootstrap_port: int
    model: ReferenceModel
    client: httpx.Client

    @property
    def bootstrap(self) -> dict[str, Any]:
        """What a router would add to a request, but for the room."""
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port}

    def post(self, server: Server, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        return self.client.post(server.url + path, json=dict(body), **options)

    def answer(self, server: Server, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of an answer that must be 200."""
        response = self.post(server, path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, server: Server, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events of a streamed answer, up to ``[DONE]``."""
        events = []
        with self.client.stream("POST", server.url + path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data:") and line != "data: [DONE]":
                    events.append(json.loads(line.removeprefix("data:")))
        return events

    def state(self, server: Server) -> dict[str, Any]:
        """sgl-jax's account of itself."""
        state: dict[str, Any] = self.client.get(server.url + "/get_server_info").json()["internal_states"][0]
        return state

    def wait_settled(self) -> None:
        """Waits until nothing runs and every page and slot is back. sgl-jax checks its own books when it is idle."""
        deadline = time.monotonic() + SETTLE_SECONDS
        for server in (self.prefill, self.decode):
            while left := _unsettled(self.state(server)):
                assert time.monotonic() < deadline, f"{server.name}: {left}\n{server.tail()}"
                time.sleep(0.2)
            assert server.is_ready()

    def wait_for_log(self, server: Server, text: str) -> None:
        """Waits until a server has said something."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while text not in server.log.read_text(errors="replace"):
            assert time.monotonic() < deadline, f"{server.name} did not log {text!r}:\n{server.tail()}"
            time.sleep(0.1)


def _unsettled(state: Mapping[str, Any]) -> dict[str, Any]:
    books = {
        name: state[name] for name in ("running_batch_size", "waiting_queue_size", "req_to_token_pool_used")
    }
    left = {name: value for name, value in books.items() if value}
    pages = state["available_kv_tokens"] + state["tree_cache_size"]
    return left if pages == POOL else {**left, "available_kv_tokens + tree_cache_size": pages}


@contextmanager
def deployment(
    directory: Path,
    *,
    prefill: SglJaxEngine,
    decode: SglJaxEngine,
    settings: Mapping[str, Any] | None = None,
    routers: Sequence[str] = ("mini_lb",),
) -> Iterator[Deployment]:
    """Starts everything, and stops it."""
    p_port, d_port, bootstrap_port, lb_port, rust_port, metrics_port = free_ports(6)
    shared = {**SETTINGS, **(settings or {})}
    p = prefill.server(
        "prefill", port=p_port, directory=directory, settings={**shared, "bootstrap_port": bootstrap_port}
    )
    d = decode.server("decode", port=d_port, directory=directory, settings=shared)
    # Connections are not kept: no test is to leave one behind.
    limits = httpx.Limits(max_keepalive_connections=0)
    with Fleet() as fleet, httpx.Client(timeout=REQUEST_SECONDS, limits=limits) as client:
        fleet.start(p, d)
        fleet.wait_ready([p, d], START_SECONDS)
        made = {
            "mini_lb": mini_lb(p, bootstrap_port, d, port=lb_port, log=directory / "mini_lb.log"),
            "rust": rust_router(
                p, bootstrap_port, d, port=rust_port, metrics_port=metrics_port, log=directory / "rust.log"
            ),
        }
        chosen = {name: made[name] for name in routers}
        fleet.start(*chosen.values())
        fleet.wait_ready(chosen.values(), START_SECONDS)
        yield Deployment(p, d, chosen, bootstrap_port, ReferenceModel(make_checkpoint()), client)
