"""The launch template, with the CPU in place of the chips."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from sgl_pd_connector.testing.engines import ENGINES, VllmEngine
from sgl_pd_connector.testing.reference import ReferenceModel
from sgl_pd_connector.testing.servers import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "launch_single_node_pd.sh"
PORTS = [
    "BOOTSTRAP_PORT",
    "PREFILL_PORT",
    "PREFILL_TRANSFER_PORT",
    "PREFILL_SIDE_CHANNEL_PORT",
    "DECODE_PORT",
]
PORTS += ["DECODE_TRANSFER_PORT", "DECODE_SIDE_CHANNEL_PORT", "ROUTER_PORT"]


def test_it_serves_until_interrupted(tmp_path: Path) -> None:
    engine = ENGINES["vllm"](None)
    assert isinstance(engine, VllmEngine)
    ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
    log = tmp_path / "transfers.jsonl"
    environment = {
        **os.environ,
        **engine.environment,
        **ports,
        "PYTHON": sys.executable,
        "MODEL": engine.model,
    }
    environment |= {"LOG_DIR": str(tmp_path), "TRANSFER_LOG": str(log)}
    options = ["--max-model-len", "1024", "--block-size", "16", *engine.extra_args]
    # Where tests run in the background, interrupts are ignored, and a shell that starts so cannot change that.
    command = ["env", "--default-signal=INT", str(SCRIPT), *options]
    with (
        (tmp_path / "script.log").open("w+") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as script,
    ):
        try:
            deadline = time.monotonic() + 500
            while "serving at" not in (said := (tmp_path / "script.log").read_text()):
                assert script.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.5)
            prompt = list(b"a prompt of more than one page, sent through all four processes")
            path, body = engine.request(prompt, 8)
            answer = httpx.post(
                f"http://127.0.0.1:{ports['ROUTER_PORT']}{path}", json=body, timeout=60
            ).json()
        finally:
            script.send_signal(signal.SIGINT)
    assert script.returncode == 130
    assert engine.token_ids(answer) == ReferenceModel(Path(engine.model)).greedy(prompt, 8).tokens
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert {(record["role"], record["outcome"], record["pages"]) for record in records} == {
        ("prefill", "ok", 4),
        ("decode", "ok", 4),
    }
    for port in ports.values():
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
