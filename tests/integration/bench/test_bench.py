"""The benchmarks at their smallest: real processes and sockets, figures that can be true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sgl_pd_connector.bench import control, handoff, report
from sgl_pd_connector.bench.handoff import HandoffPair
from sgl_pd_connector.bench.shapes import SHAPES, HandoffCase
from sgl_pd_connector.cli.bench import app

pytestmark = pytest.mark.integration


def test_handoff_times_every_system_on_several_cases(tmp_path: Path) -> None:
    tiny = SHAPES["tiny"]
    with HandoffPair() as pair:
        results = [pair.run(HandoffCase(tiny, *size), rounds=2) for size in ((1, 1), (5, 3))]
    found = handoff.section(results)
    for case, nbytes in zip(found["cases"], (1, 5 * 3), strict=True):
        assert case["nbytes"] == nbytes * tiny.page_bytes
        assert set(case["median_s"]) == {"ours", "raw", "tcp", "memcpy"}
        assert min(case["median_s"].values()) > 0
        assert case["wire_bytes_per_page_byte"] == 1.0
        assert case["compiles_after_warmup"] == 0
        assert min(case["peak_rss_bytes"].values()) > 1 << 20
        assert case["stages_s"]["pull"] > 0
    assert "64 KB" in report.markdown(report.add(tmp_path / "out.json", "handoff", found))


def test_a_process_that_fails_says_why_and_both_end() -> None:
    with HandoffPair() as pair, pytest.raises(RuntimeError, match="KeyError: 'no such system'"):
        pair.run(HandoffCase(SHAPES["tiny"], 1), rounds=1, systems=("ours", "no such system"))


def test_the_bootstrap_server_keeps_every_rank_under_heartbeats() -> None:
    found = control.bootstrap(100, ranks_per_process=8, seconds=1.0)
    assert found["still_registered"] == 100
    assert found["lookups"] > 0
    assert 0 < found["lookup_s"]["p50"] <= found["lookup_s"]["p99"]
    assert 0 <= found["cpu_share"] < 2


def test_the_side_channel_answers_every_subscription() -> None:
    assert control.side_channel(500)["messages_per_s"] > 0


def test_rooms_in_flight_all_end() -> None:
    assert control.rooms(20, rounds=1)["seconds_per_room"] > 0


def test_a_report_is_printed_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text(json.dumps({"goals": [{"goal": "g", "bound": "<= 1", "value": 2, "met": False}]}))
    result = CliRunner().invoke(app, ["report", str(file)])
    assert result.exit_code == 0
    assert "| g | <= 1 | 2 | **no** |" in result.output
