"""Reports: sections come together in one file, goals are judged, a missed one shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_pd_connector.bench import report
from sgl_pd_connector.bench.handoff import HandoffResult, section
from sgl_pd_connector.bench.measure import Comparison
from sgl_pd_connector.bench.plots import plot
from sgl_pd_connector.bench.ratios import serve_ratios
from sgl_pd_connector.bench.shapes import SHAPES, HandoffCase

pytestmark = pytest.mark.unit

RECORD = {"outcome": "ok", "bootstrap_s": 0.1, "input_s": 0.2, "pull_s": 0.3, "transfer_s": 0.5}


def handoff_result(nbytes: int, ours: float, raw: float, *, compilations: int = 7) -> HandoffResult:
    shape = SHAPES["tiny"]
    case = HandoffCase(shape, shape.pages(nbytes))
    seconds = {name: [value] * 3 for name, value in {"ours": ours, "raw": raw, "memcpy": 0.001}.items()}
    counted = {"compilations": compilations, "nbytes": 5 * case.nbytes, "ok": 5}
    side = {"records": [RECORD] * 5, "stats": counted, "peak_rss_bytes": 1 << 30}
    return HandoffResult(case, Comparison(seconds), 14, side, side)


def serve_run(system: str, repeat: int, *, ttft: float, rate: float, failures: int = 0) -> dict[str, Any]:
    figures = {
        "requests": 10,
        "failures": failures,
        "requests_per_s": rate,
        "ttft_s": {"p50": ttft, "p95": ttft, "p99": 2 * ttft},
        "itl_s": {"p50": 0.01, "p99": 0.02},
        "occupied": {"prefill": 0.1, "decode": 0.2},
    }
    return {
        "system": system,
        "repeat": repeat,
        "workloads": {"mixed": figures},
        "programs_compiled_under_load": {} if system == "sgl" else {"jit_select_from_kv_caches": 9},
        "compiles_after_warmup": 0,
        "itl": {"prefills": {"p99": 0.02}, "transfers": {"p99": 0.021}},
    }


RUNS = [
    serve_run("sgl", 0, ttft=0.1, rate=4.0),
    serve_run("tpu_connector", 0, ttft=0.4, rate=2.0),
    serve_run("tpu_connector", 1, ttft=0.8, rate=2.0, failures=1),
    serve_run("sgl", 1, ttft=0.4, rate=4.0),
]


def met(goals: list[report.Goal], part: str) -> bool:
    (goal,) = (goal for goal in goals if part in goal.name)
    return goal.met


@pytest.mark.parametrize(("ours", "expected"), [(0.101, True), (0.2, False)])
def test_a_handoff_half_as_fast_as_the_raw_pull_misses_its_goal(ours: float, expected: bool) -> None:
    found = section([handoff_result(1 << 16, 0.001, 0.0005), handoff_result(16 << 20, ours, 0.1)])
    assert found["ratio_to_raw"] == {"65536": 0.5, str(16 << 20): pytest.approx(0.1 / ours)}
    goals = report.goals({"handoff": found, "compiles_after_warmup": 0})
    assert met(goals, "throughput by that of the raw pull") is expected
    assert met(goals, "ms above the raw pull")


def test_compilations_after_the_warm_up_are_counted() -> None:
    assert handoff_result(1 << 20, 1.0, 1.0).compiles_after_warmup == 0
    assert handoff_result(1 << 20, 1.0, 1.0, compilations=8).compiles_after_warmup == 2


def test_serving_ratios_are_taken_within_a_repeat() -> None:
    found = serve_ratios(RUNS)
    # 0.1 / 0.4 and 0.4 / 0.8; the medians' own ratio would be 0.42.
    assert found["mixed"] == {"ttft_p50_ratio": 0.375, "ttft_p99_ratio": 0.375, "throughput_ratio": 2.0}
    assert found["itl_p99_ratio"] == pytest.approx(1.05)
    assert found["failures"] == {"sgl": 0, "tpu_connector": 1}


def test_a_system_that_answered_nothing_has_no_ratio() -> None:
    silent = serve_run("tpu_connector", 0, ttft=1.0, rate=1.0)
    silent["workloads"]["mixed"] = {"requests": 10, "failures": 10}
    assert "mixed" not in serve_ratios([serve_run("sgl", 0, ttft=1.0, rate=1.0), silent])


def test_sections_are_added_to_one_report_with_tables_and_plots(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    report.add(file, "handoff", section([handoff_result(size, 0.1, 0.09) for size in (1 << 16, 1 << 20)]))
    whole = report.add(file, "serve", {"runs": RUNS, **serve_ratios(RUNS)})
    assert json.loads(file.read_text()) == whole
    assert whole["serve"]["mixed"]["ttft_p99_ratio"] == 0.375
    assert whole["compiles_after_warmup"] == 0
    text = report.markdown(whole)
    assert "| handoff of 64 KB: ms above the raw pull | <= 2 | 10 | **no** |" in text
    assert "| serving, mixed lengths: requests/s by TPUConnector's | >= 1.1 | 2 | yes |" in text
    names = {path.name for path in plot(whole, tmp_path / "plots")}
    assert names == {"handoff.png", "handoff.svg", "serve.png", "serve.svg"}


def test_tables_have_three_digits_and_no_gaps() -> None:
    assert report.table(["a", "b"], [[1.23456, None], [12345.6, True]]) == (
        "| a | b |\n| --- | --- |\n| 1.23 | - |\n| 12,346 | yes |\n"
    )
