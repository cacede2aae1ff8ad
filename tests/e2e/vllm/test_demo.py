"""The demo as a user runs it: its exit status, its JSON, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SGL_PD = str(Path(sys.executable).with_name("sgl-pd"))


@contextmanager
def running(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``sgl-pd demo``, whose temporary files, and so the logs of its servers, are in ``tmp_path``."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [SGL_PD, "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        for pid in processes_with_logs_in(tmp_path):
            os.kill(pid, signal.SIGKILL)


def processes_with_logs_in(directory: Path) -> list[int]:
    """The processes whose output goes to files there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "fd" / "1").readlink().is_relative_to(directory):
                found.append(int(process.name))
        except OSError:
            continue  # not ours, or gone meanwhile
    return found


@pytest.mark.parametrize("arguments", [[], ["--sequential"]], ids=["mini_lb", "sequential"])
def test_every_token_is_a_plain_servers(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with running(tmp_path, "--json", str(out), *arguments) as demo:
        printed, _ = demo.communicate(timeout=800)
    assert demo.returncode == 0, printed
    results = json.loads(out.read_text())
    assert results["requests"] >= 40
    assert results["mismatches"] == 0
    assert results["transferred_bytes"] > 0
    entries = results["per_request"]
    assert len(entries) == results["requests"]
    assert all(entry["ok"] and entry["pages"] == -(-entry["prompt_tokens"] // 16) for entry in entries)
    assert sum(entry["bytes"] for entry in entries) == results["transferred_bytes"]
    assert all(entry["pull_ms"] > 0 for entry in entries)
    lengths = {entry["prompt_tokens"] for entry in entries}
    assert {1, 15, 16, 17, 31, 32, 33} <= lengths
    assert not processes_with_logs_in(tmp_path)
    assert not list(tmp_path.glob("sgl-pd-demo-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_server(number: signal.Signals, tmp_path: Path) -> None:
    with running(tmp_path) as demo:
        deadline = time.monotonic() + 120
        while not processes_with_logs_in(tmp_path):
            assert time.monotonic() < deadline
            assert demo.poll() is None
            time.sleep(0.1)
        demo.send_signal(number)
        printed, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, printed
    assert printed.rstrip().endswith("stopped")
    assert not processes_with_logs_in(tmp_path)
