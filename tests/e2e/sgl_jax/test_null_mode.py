"""With this package installed and ``--disaggregation-mode null`` sgl-jax is what it is without: to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.sgl_jax import compat
from sgl_pd_connector.sgl_jax.launch_server import main
from sgl_pd_connector.sgl_jax.surface import SchedulerSurface
from sgl_pd_connector.testing.servers import Fleet, Server, free_ports
from tests.e2e.sgl_jax.deployment import REQUEST_SECONDS, START_SECONDS, engine
from tests.e2e.sgl_jax.prompts import greedy, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Its imports warn.
IMPORTS_SGL_JAX = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LAUNCHER = "sgl_pd_connector.sgl_jax.launch_server"


def _logprobs(server: Server) -> list[Any]:
    """What a server computes, as unrounded as its API gives it."""
    found = []
    with Fleet() as fleet:
        fleet.start(server)
        fleet.wait_ready([server], START_SECONDS)
        for length in (1, 17, 64):
            body = {"text": prompt(length, seed=80), "sampling_params": greedy(), "return_logprob": True}
            body |= {"logprob_start_len": 0, "top_logprobs_num": 5, "return_text_in_logprobs": False}
            answer = httpx.post(server.url + "/generate", json=body, timeout=REQUEST_SECONDS).json()
            found.append({name: value for name, value in answer["meta_info"].items() if "logprobs" in name})
    return found


def test_logits_are_bit_identical(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    stock = engine().server("plain", port=port, directory=tmp_path)
    module = list(stock.command).index("sgl_jax.launch_server")
    command = [
        *stock.command[:module],
        LAUNCHER,
        *stock.command[module + 1 :],
        "--disaggregation-mode",
        "null",
    ]
    ours = replace(stock, name="null mode", command=command, log=tmp_path / "null.log")
    assert _logprobs(ours) == _logprobs(stock)


@IMPORTS_SGL_JAX
def test_wrong_settings_end_the_launcher_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    model = engine().model
    plain = ["--model-path", model, "--device", "cpu", "--disaggregation-mode", "decode"]
    for flags, message in (
        (["--dp-size", "2"], "--dp-size 2: not supported with --disaggregation-mode decode"),
        (["--disaggregation-bootstrap-url", "x"], "--disaggregation-bootstrap-url: of sgl-jax's own"),
        (["--disaggregation-config", '{"lease": -1}'], "lease"),
    ):
        assert main([*plain, *flags]) == 2
        error = capfd.readouterr().err
        assert message in error
        assert "Traceback" not in error


@IMPORTS_SGL_JAX
def test_another_sgl_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_installed()
    monkeypatch.setattr(SchedulerSurface, "recv_requests", lambda self, timeout: [])
    with pytest.raises(ConfigError, match=r"Scheduler\.recv_requests"):
        compat.check_installed()
    monkeypatch.setattr(compat, "VERSION", "9.9")
    with pytest.raises(ConfigError, match=r"is written for 9\.9"):
        compat.check_installed()
