"""Wrong settings: a real `vllm serve` ends before any engine starts, and its last line says what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sgl_pd_connector.testing.engines import ENGINES, VllmEngine
from sgl_pd_connector.testing.servers import free_ports

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
