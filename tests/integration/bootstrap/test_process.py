"""``sgl-pd bootstrap`` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
from sgl_pd_connector.wire.address import Address
from tests.registrations import make_route

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-c", "from sgl_pd_connector.cli.main import main; main()", "bootstrap"]


@contextmanager
def running(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    process = subprocess.Popen(
        [*COMMAND, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )
    with process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("bootstrap server on http://"), ready
            yield process, Address.parse(ready.strip().rpartition("/")[2], setting="ready line")
        finally:
            process.kill()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_told_to_end(host: str, ending: signal.Signals) -> None:
    with running("--host", host, "--port", "0", "--ttl", "7") as (process, address):
        assert address.host == host
        with BootstrapClient(address) as client:
            assert client.put(make_route()).ttl == 7.0
            assert len(client.list("prefill")) == 1
        process.send_signal(ending)
        assert process.wait(30) == 0


def test_it_serves_on_after_it_was_stopped_and_continued() -> None:
    with running("--port", "0") as (process, address):
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)  # Longer than anything in it waits at a time.
        process.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        with BootstrapClient(address) as client:
            assert client.health().prefill == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_settings_of_the_environment_are_its_defaults() -> None:
    environment = {"SGL_PD_BOOTSTRAP_PORT": "0", "SGL_PD_HEARTBEAT_TTL": "21.5"}
    with running(**environment) as (_, address), BootstrapClient(address) as client:
        assert client.health().ttl == 21.5


def refused(*options: str) -> str:
    """The one line on stderr with which the command refuses to start."""
    ended = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (1, "", 1), ended.stderr
    return ended.stderr


def test_a_port_in_use_is_one_line_that_names_the_option(server: HTTPBootstrapServer) -> None:
    line = refused("--host", server.address.host, "--port", str(server.address.port))
    assert line.startswith(f"sgl-pd: bootstrap server: {server.address} is in use")
    assert "--port" in line


def test_other_machines_are_not_served_without_a_secret() -> None:
    line = refused("--host", "0.0.0.0", "--port", "0")
    assert "secret_file" in line
