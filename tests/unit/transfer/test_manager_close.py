"""In which order a manager ends its parts, each of which only writes down what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.transfer import manager as module
from sgl_pd_connector.transfer.manager import JaxTransferKVManager
from sgl_pd_connector.transfer.pool import kv_args

pytestmark = pytest.mark.unit

NUMERIC = "127.0.0.1:9"


class Part:
    """Any part of a manager."""

    transfer_addr = zmq_addr = address = NUMERIC
    transfer_ports = ()

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls
        self.channel = self

    def start(self, *_: Any) -> None: ...

    def stop(self) -> None:
        self._calls.append(f"{self._name}.stop")

    def close(self) -> None:
        self._calls.append(f"{self._name}.close")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def part(name: str) -> Callable[..., Part]:
        return lambda *_, **__: Part(name, calls)

    monkeypatch.setattr(module, "HTTPBootstrapServer", part("server"))
    monkeypatch.setattr(module, "JaxTransferKVEngine", part("engine"))
    monkeypatch.setattr(module, "PrefillSide", part("prefill"))
    monkeypatch.setattr(module, "Registrar", part("registrar"))
    return calls


def test_peers_are_told_before_it_waits_for_the_registrar_and_that_before_its_server_goes(
    calls: list[str],
) -> None:
    args = kv_args([jnp.zeros((4, 16, 2, 8), jnp.float32)], page_size=16)
    manager = JaxTransferKVManager(args, None, role="prefill", config=ConnectorConfig())
    manager.register_runner(None)  # type: ignore[arg-type]
    manager.close()
    manager.close()
    assert calls == ["registrar.stop", "prefill.close", "registrar.close", "server.stop"]
