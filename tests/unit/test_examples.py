"""The launch template: what it would start."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from sgl_pd_connector.config import load_config

pytestmark = pytest.mark.unit

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "launch_single_node_pd.sh"


def dry_run(*arguments: str, **environment: str) -> dict[str, list[str]]:
    """The four commands by name."""
    variables = {"PATH": os.environ["PATH"], "MODEL": "m", **environment}
    done = subprocess.run(
        [SCRIPT, "--dry-run", *arguments], env=variables, capture_output=True, text=True, check=True
    )
    lines = [line.partition(":") for line in done.stdout.splitlines()]
    return {name: shlex.split(command) for name, _, command in lines}


def transfer_config(command: list[str]) -> dict[str, object]:
    config: dict[str, object] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return config


def test_the_ports_are_those_of_the_template() -> None:
    commands = dry_run()
    assert commands["bootstrap"][-1] == "8000"
    assert commands["prefill"][commands["prefill"].index("--port") + 1] == "7080"
    assert commands["decode"][commands["decode"].index("--port") + 1] == "7081"
    settings = {"bootstrap_addr": "127.0.0.1:8000", "transfer_port": 9080, "side_channel_port": 6080}
    assert transfer_config(commands["prefill"])["kv_connector_extra_config"] == settings
    settings |= {"transfer_port": 9081, "side_channel_port": 6081}
    assert transfer_config(commands["decode"])["kv_connector_extra_config"] == settings
    router = shlex.join(commands["router"])
    assert "--port 8001" in router
    assert "--prefill http://127.0.0.1:7080 8000 --decode http://127.0.0.1:7081" in router


def test_p_and_d_have_their_roles_and_valid_settings() -> None:
    commands = dry_run(TRANSFER_LOG="/tmp/log")
    for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = transfer_config(commands[name])
        assert (config["kv_connector"], config["kv_role"]) == ("SglJaxConnector", role)
        extra = config["kv_connector_extra_config"]
        assert isinstance(extra, dict)
        assert load_config(extra, where="example", environ={}).transfer_log == "/tmp/log"


def test_each_server_sees_its_own_chips() -> None:
    commands = dry_run(PREFILL_CHIPS="0,1", DECODE_CHIPS="2,3")
    assert commands["prefill"][1:3] == ["TPU_VISIBLE_CHIPS=0,1", "TPU_CHIPS_PER_PROCESS_BOUNDS=1,2,1"]
    assert commands["decode"][1:3] == ["TPU_VISIBLE_CHIPS=2,3", "TPU_CHIPS_PER_PROCESS_BOUNDS=1,2,1"]


def test_further_options_go_to_both_servers_and_nowhere_else() -> None:
    commands = dry_run("--max-model-len", "8192")
    having = {name for name, command in commands.items() if "--max-model-len" in command}
    assert having == {"prefill", "decode"}


def test_every_variable_is_documented() -> None:
    text = SCRIPT.read_text()
    used = set(re.findall(r"\$\{([A-Z][A-Z_]+)", text))
    documented = subprocess.run([SCRIPT, "-h"], capture_output=True, text=True, check=True).stdout
    assert used
    assert not [name for name in used if name not in documented]


def test_a_missing_model_is_one_line_that_says_what_to_do() -> None:
    done = subprocess.run(
        [SCRIPT], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "launch_single_node_pd.sh: set MODEL to the path or name of a model (see -h)"
    ]
