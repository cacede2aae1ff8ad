"""A real `vllm serve` with wrong settings ends before any engine starts and says what to do; one that is stopped says
goodbye."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
from sgl_pd_connector.testing.engines import ENGINES, VllmEngine
from sgl_pd_connector.testing.servers import LOCALHOST, Fleet, free_ports
from tests.waiting import eventually

pytestmark = pytest.mark.e2e


def last_line(tmp_path: Path, role: str, **settings: Any) -> str:
    """What a server says last; it must end with status 1."""
    engine = ENGINES["vllm"](None)
    assert isinstance(engine, VllmEngine)
    (port,) = free_ports(1)
    server = engine.server("prefill", port=port, directory=tmp_path)
    transfer = {"kv_connector": "SglJaxConnector", "kv_role": role, "kv_connector_extra_config": settings}
    command = [*server.command, "--kv-transfer-config", json.dumps(transfer)]
    environment = {**os.environ, **server.environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    assert "(EngineCore pid=" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_a_wrong_role(tmp_path: Path) -> None:
    assert last_line(tmp_path, "kv_both").startswith("SglJaxConnector: kv_role = kv_both: ")


def test_an_unknown_setting(tmp_path: Path) -> None:
    line = last_line(tmp_path, "kv_consumer", laese=3)
    assert line.startswith("SglJaxConnector: kv_connector_extra_config: unknown setting 'laese'; settings: ")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = last_line(tmp_path, "kv_producer", bootstrap_port=port)
    assert line == (
        f"SglJaxConnector: bootstrap_port = {port}: cannot listen on 127.0.0.1:{port}: Address already in use"
    )


def test_all_interfaces_as_host(tmp_path: Path) -> None:
    line = last_line(tmp_path, "kv_producer", host="0.0.0.0", allow_insecure=True)
    assert line.startswith("SglJaxConnector: host = '0.0.0.0': peers are told to connect to this address")


@pytest.mark.timeout(500)
def test_a_server_that_may_end_its_work_deregisters(tmp_path: Path) -> None:
    engine = ENGINES["vllm"](None)
    assert isinstance(engine, VllmEngine)
    engine = replace(engine, extra_args=[*engine.extra_args, "--shutdown-timeout", "20"])
    bootstrap = HTTPBootstrapServer(LOCALHOST, 0, ttl=3600)
    bootstrap.start()
    try:
        with Fleet() as fleet, BootstrapClient(bootstrap.address) as client:
            (port,) = free_ports(1)
            settings = {"bootstrap_addr": str(bootstrap.address), "heartbeat_ttl": 3600}
            server = engine.server("prefill", port=port, directory=tmp_path, settings=settings)
            fleet.start(server)
            fleet.wait_ready([server], 400)
            eventually(lambda: len(client.list("prefill")) == 1, "P is registered")
            os.kill(server.group, signal.SIGTERM)  # the first process alone, as Kubernetes does
            eventually(lambda: not client.list("prefill"), "P has deregistered")
    finally:
        bootstrap.stop()
