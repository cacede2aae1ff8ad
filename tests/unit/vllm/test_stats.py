"""Metrics payloads: what a step adds, and how payloads of several steps become one."""

from __future__ import annotations

import pytest

from sgl_pd_connector.transfer.stats import TransferRecord, TransferStats
from sgl_pd_connector.vllm import stats

pytestmark = pytest.mark.unit


def record(outcome: str, transfer_s: float = 0.5, role: str = "decode") -> TransferRecord:
    ok = outcome == "ok"
    return TransferRecord(
        role=role,
        room=1,
        outcome=outcome,
        error="" if ok else "why",
        num_tokens=10,
        pages=3 if ok else 0,
        nbytes=3000 if ok else 0,
        retries=1,
        bootstrap_s=0.1,
        input_s=0.2,
        transfer_s=transfer_s,
        pull_s=0.3,
    )


def test_a_step_counts_by_outcome_and_observes_what_was_ok() -> None:
    payload = stats.collect([record("ok"), record("timeout"), record("ok", 1.5)], TransferStats(in_flight=4))
    assert (payload["ok"], payload["timeout"], payload["failed"]) == (2, 1, 0)
    assert (payload["bytes"], payload["pages"]) == (6000, 6)
    assert payload["retries"] == 3, "also of those that failed in the end"
    assert payload["transfer_seconds"] == [0.5, 1.5]
    assert payload["gauges"]["in_flight"] == 4


def test_p_pulls_nothing_so_it_observes_no_pull() -> None:
    payload = stats.collect([record("ok", role="prefill")], TransferStats())
    assert payload["transfer_seconds"] == [0.5]
    assert payload["pull_seconds"] == []


def test_steps_merge_into_sums_all_observations_and_the_last_gauges() -> None:
    first = stats.collect([record("ok")], TransferStats(in_flight=4, compilations=7))
    second = stats.collect([record("ok", 2.5), record("aborted")], TransferStats(in_flight=1, compilations=7))
    both = stats.merge(first, second)
    assert (both["ok"], both["aborted"]) == (2, 1)
    assert both["transfer_seconds"] == [0.5, 2.5]
    assert (both["gauges"]["in_flight"], both["gauges"]["compilations"]) == (1, 7)


def test_merging_with_nothing_changes_nothing() -> None:
    payload = stats.collect([record("ok")], TransferStats(in_flight=4))
    assert stats.merge(stats.empty(), payload) == payload
    assert stats.merge(payload, stats.empty()) == payload
    assert stats.is_empty(stats.empty())
    assert not stats.is_empty(payload)


def test_the_log_line_names_what_happened_and_only_that() -> None:
    line = stats.summary(stats.collect([record("ok"), record("failed")], TransferStats()))
    assert line["ok"] == line["failed"] == 1
    assert line["mean transfer (ms)"] == 500
    assert "timeout" not in line
    assert stats.summary(stats.empty()) == {}
