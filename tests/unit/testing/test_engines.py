"""The command lines of the engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.testing import engines
from sgl_pd_connector.testing.engines import VllmEngine

pytestmark = pytest.mark.unit

EMULATED = VllmEngine("m", 16, 1024, emulated=True, environment={"SGL_PD_CPU_EMULATION": "1"})


def transfer_config(command: list[str]) -> dict[str, object] | None:
    if "--kv-transfer-config" not in command:
        return None
    config: dict[str, object] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return config


def test_a_plain_server_knows_nothing_of_the_connector(tmp_path: Path) -> None:
    server = EMULATED.server("plain", port=1, directory=tmp_path, settings={"lease": 3})
    assert transfer_config(list(server.command)) is None
    assert server.environment == {"SGL_PD_CPU_EMULATION": "1"}


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_p_and_d_differ_in_their_role(role: engines.Role, kv_role: str, tmp_path: Path) -> None:
    server = EMULATED.server(role, port=1, directory=tmp_path, settings={"lease": 3})
    config = transfer_config(list(server.command))
    assert config == {
        "kv_connector": "SglJaxConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"lease": 3},
    }


def test_on_tpus_p_and_d_get_a_chip_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "2,3")
    engine = VllmEngine("m", 128, 2048, emulated=False)
    roles: list[engines.Role] = ["plain", "prefill", "decode"]
    chips = [
        engine.server(role, port=1, directory=tmp_path).environment["TPU_VISIBLE_CHIPS"] for role in roles
    ]
    assert chips == ["2", "2", "3"]


def test_one_chip_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0")
    engine = VllmEngine("m", 128, 2048, emulated=False)
    with pytest.raises(ConfigError, match="P and D need a TPU chip each, and this machine has 1"):
        engine.server("prefill", port=1, directory=tmp_path)
