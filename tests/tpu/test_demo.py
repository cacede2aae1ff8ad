"""What only a TPU can show: the demo on real chips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs_tpu, pytest.mark.e2e, pytest.mark.timeout(3600)]


def test_every_token_is_a_plain_servers(tmp_path: Path) -> None:
    model = os.environ.get("PD_TEST_MODEL", "Qwen/Qwen3-0.6B")
    out = tmp_path / "out.json"
    command = [str(Path(sys.executable).with_name("sgl-pd")), "demo", "--model", model, "--json", str(out)]
    subprocess.run(command, check=True)
    results = json.loads(out.read_text())
    assert results["mismatches"] == 0
    assert results["transferred_bytes"] > 0
