"""Child processes: started, waited for, and gone afterwards, with all that they spawned."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from sgl_pd_connector.testing.servers import Fleet, Server, ServerError, free_ports, sequential_proxy

pytestmark = pytest.mark.integration

SPAWNER = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
os.execv(sys.executable, [sys.executable, "-m", "http.server", sys.argv[1], "--bind", "127.0.0.1"])
"""

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""

ECHO = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = 400 if sys.argv[2] == body.get("refused_by") else 200
        params = {"bootstrap_room": 7} if sys.argv[2] == "prefill" else None
        self.answer(status, {"server": sys.argv[2], "path": self.path, "asked": body, "kv_transfer_params": params})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def python(name: str, code: str, directory: Path, *arguments: str) -> Server:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", code, str(port), *arguments]
    return Server(name, command, port, directory / f"{name}.log", health="/")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_is_awaited_and_ends_with_the_block_together_with_its_children(tmp_path: Path) -> None:
    server = python("spawner", SPAWNER, tmp_path)
    ready: list[Server] = []
    with Fleet() as fleet:
        fleet.start(server)
        fleet.wait_ready([server], 30, ready.append)
        assert ready == [server]
        assert httpx.get(server.url).status_code == 200
        child = int(server.tail().splitlines()[0])
        assert is_alive(child)
    assert not server.running
    wait_until(lambda: not is_alive(child))


def test_the_block_ends_them_after_an_exception_too(tmp_path: Path) -> None:
    server = python("spawner", SPAWNER, tmp_path)

    def interrupted() -> None:
        with Fleet() as fleet:
            fleet.start(server)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not server.running


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_pd_connector.testing.servers._STOP_SECONDS", 0.1)
    server = python("deaf", DEAF, tmp_path)
    with Fleet() as fleet:
        fleet.start(server)
        wait_until(lambda: "deaf" in server.tail())
    assert server._process is not None
    assert server._process.returncode == -signal.SIGKILL


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    server = python("broken", "raise SystemExit('port taken, change --port')", tmp_path)
    with Fleet() as fleet:
        fleet.start(server)
        with pytest.raises(
            ServerError, match=r"(?s)broken ended \(status 1\).*broken\.log.*port taken, change --port"
        ):
            fleet.wait_ready([server], 30)


def test_a_server_that_never_serves_is_reported(tmp_path: Path) -> None:
    server = python("silent", "import time; print('loading', flush=True); time.sleep(600)", tmp_path)
    with Fleet() as fleet:
        fleet.start(server)
        wait_until(lambda: "loading" in server.tail())
        with pytest.raises(ServerError, match=r"(?s)silent is not ready after 0\.1 s.*loading"):
            fleet.wait_ready([server], 0.1)


def test_a_server_is_told_apart_from_this_process_by_its_group(tmp_path: Path) -> None:
    server = python("spawner", SPAWNER, tmp_path)
    with Fleet() as fleet:
        fleet.start(server)
        assert server._process is not None
        assert os.getpgid(server._process.pid) == server._process.pid != os.getpgid(0)


def test_free_ports_are_distinct() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20


def test_free_ports_are_none_that_a_connection_may_take_meanwhile() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not set(free_ports(50)) & set(range(low, high + 1))


class TestTheSequentialProxy:
    def ask(self, tmp_path: Path, body: dict[str, object]) -> httpx.Response:
        prefill = python("prefill", ECHO, tmp_path, "prefill")
        decode = python("decode", ECHO, tmp_path, "decode")
        (port,) = free_ports(1)
        proxy = sequential_proxy(prefill, decode, port=port, log=tmp_path / "proxy.log")
        with Fleet() as fleet:
            fleet.start(prefill, decode, proxy)
            fleet.wait_ready([prefill, decode, proxy], 60)
            return httpx.post(proxy.url + "/v1/completions", json=body, timeout=30)

    def test_decode_gets_what_prefill_answered(self, tmp_path: Path) -> None:
        answer = self.ask(tmp_path, {"prompt": "hi", "max_tokens": 3})
        assert answer.json() == {
            "server": "decode",
            "path": "/v1/completions",
            "asked": {"prompt": "hi", "max_tokens": 3, "kv_transfer_params": {"bootstrap_room": 7}},
            "kv_transfer_params": None,
        }

    def test_what_prefill_refuses_does_not_reach_decode(self, tmp_path: Path) -> None:
        answer = self.ask(tmp_path, {"refused_by": "prefill"})
        assert answer.status_code == 400
        assert answer.json()["server"] == "prefill"

    def test_prefill_is_asked_for_one_token_in_one_piece(self, tmp_path: Path) -> None:
        limits = {"max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 5}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        answer = self.ask(tmp_path, {"refused_by": "prefill", "temperature": 0, **limits, **streamed})
        assert answer.json()["asked"] == {
            "refused_by": "prefill",
            "temperature": 0,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }

    def test_decodes_status_is_the_clients(self, tmp_path: Path) -> None:
        answer = self.ask(tmp_path, {"refused_by": "decode"})
        assert answer.status_code == 400
        assert answer.json()["server"] == "decode"
