"""`sgl-pd doctor`: one finding per thing an instance would trip over."""

import importlib.metadata
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sgl_pd_connector.cli import doctor
from sgl_pd_connector.cli.doctor import Level
from sgl_pd_connector.cli.main import app
from sgl_pd_connector.config import load_config

pytestmark = pytest.mark.unit


def levels(findings: Any) -> dict[str, Level]:
    return {finding.subject: finding.level for finding in findings}


def config(**settings: Any) -> Any:
    return load_config(settings, where="test", environ={})


def test_an_untested_version_is_a_warning_and_a_missing_engine_is_none() -> None:
    def installed(package: str) -> str:
        if package == "jax":
            return "0.99"
        if package == "vllm-tpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError

    assert levels(doctor.check_versions(installed)) == {"jax": Level.WARNING, "vllm-tpu": Level.OK}


def test_loopback_needs_no_secret() -> None:
    assert levels(doctor.check_exposure(config())) == {"host": Level.OK}


def test_a_private_address_needs_one(tmp_path: Path) -> None:
    assert levels(doctor.check_exposure(config(host="10.1.2.3")))["secret"] is Level.ERROR
    assert (
        levels(doctor.check_exposure(config(host="10.1.2.3", allow_insecure=True)))["secret"] is Level.WARNING
    )
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    found = levels(doctor.check_exposure(config(host="10.1.2.3", secret_file=str(file))))
    assert found == {"host": Level.OK, "secret": Level.OK}


def test_a_public_address_exposes_the_transfer_port_even_with_a_secret() -> None:
    found = levels(doctor.check_exposure(config(host="8.8.8.8", secret="0123456789abcdef")))
    assert found["transfer port"] is Level.WARNING


def test_a_wildcard_cannot_be_advertised() -> None:
    assert levels(doctor.check_exposure(config(host="::"))) == {"host": Level.ERROR}


def test_a_port_in_use_is_an_error_that_names_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = levels(doctor.check_ports(config(bootstrap_port=port, side_channel_port=0)))
    assert found == {"bootstrap_port": Level.ERROR}


def test_a_bootstrap_server_that_does_not_answer_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert levels(doctor.check_bootstrap(config(bootstrap_addr=address))) == {
            "bootstrap_addr": Level.ERROR
        }
    assert levels(doctor.check_bootstrap(config())) == {}


def test_the_command_reports_and_fails_on_errors() -> None:
    run = CliRunner().invoke(app, ["doctor", "--no-transfer", "--config", '{"host": "0.0.0.0"}'])
    assert run.exit_code == 1
    assert "cannot be advertised" in run.output
    good = CliRunner().invoke(app, ["doctor", "--no-transfer", "--config", '{"bootstrap_port": 0}'])
    assert good.exit_code == 0, good.output


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_config_that_is_no_object_is_a_usage_error(text: str) -> None:
    assert CliRunner().invoke(app, ["doctor", "--config", text]).exit_code == 2
