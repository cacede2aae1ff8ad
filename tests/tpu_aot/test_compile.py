"""The kernels compile for TPUs that are not attached: nothing is copied but the pages, pools are aliased in place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.tpu_aot, pytest.mark.timeout(900)]

REPORT = Path(__file__).with_name("compile_report.py")


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_gather_and_scatter_need_no_memory_but_their_results(topology: str) -> None:
    pytest.importorskip("libtpu")
    run = subprocess.run(
        [sys.executable, str(REPORT), topology],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows: list[dict[str, Any]] = [json.loads(line) for line in run.stdout.splitlines()]
    if rows_file := os.environ.get("SGL_PD_AOT_ROWS"):  # keeps the rows for the table of docs/ops.md
        with Path(rows_file).open("a") as file:
            file.write(run.stdout)

    compiled = {(row["model"], row["devices"], row["function"]): row for row in rows}
    assert {devices for _, devices, _ in compiled} > {1}
    for (model, devices, function), row in compiled.items():
        where = f"{function} of {model} on {devices} devices: {row}"
        if function == "multi_layer_copy":
            continue  # recorded beside ours, not ours to judge
        assert "error" not in row, where
        # The last dimension may be padded to whole tiles in memory: more than the pool's bytes, never fewer.
        assert row["alias"] >= row["pools"] if function == "scatter" else row["alias"] == 0, where
        if row["kernel"]:
            assert (row["calls"], row["temp"]) == (1, 0), where
        else:
            assert row["calls"] == 0, where
