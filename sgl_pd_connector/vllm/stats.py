"""What a step's transfers add to the metrics, as plain data that travels from the engine to the API server.

A payload is a dict of lists (observations), sums (counters) and last values (gauges). vLLM merges the
payloads of the steps between two log lines and hands each to Prometheus.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from sgl_pd_connector.transfer.stats import TransferRecord, TransferStats

OUTCOMES = ("ok", "failed", "timeout", "aborted")
COUNTERS = {
    "bytes": "KV cache bytes of transfers that were ok: offered (P), pulled in whole chunks (D).",
    "pages": "KV cache pages of transfers that were ok: offered (P), written (D).",
    "retries": "Transfers begun anew after an error on the way.",
}
PREFILL_STAGES = ("bootstrap", "input", "transfer")
STAGES = (*PREFILL_STAGES, "pull")
GAUGES = {
    "in_flight": "Transfers that are not over.",
    "packed_bytes": "Prefill: device memory held for packed copies.",
    "registered_bytes": "Prefill: bytes offered to decode servers.",
    "pulled_bytes": "Decode: device memory held for data that is not written yet.",
    "waiting_sends": "Prefill: prompts that wait for room in max_packed_bytes.",
    "compilations": "Gather and scatter shapes compiled; constant after start-up.",
}

Payload = dict[str, Any]


def empty() -> Payload:
    """A payload that says nothing."""
    return {
        **dict.fromkeys((*OUTCOMES, *COUNTERS), 0),
        **{f"{stage}_seconds": [] for stage in STAGES},
        "gauges": {},
    }


def collect(records: Sequence[TransferRecord], stats: TransferStats) -> Payload:
    """The payload of one step: transfers finished since the last one, and the gauges now.

    Stage times are observed for transfers that were ok: a failed one has no meaningful duration but its
    deadline.
    """
    payload = empty()
    for record in records:
        payload[record.outcome] += 1
        payload["bytes"] += record.nbytes
        payload["pages"] += record.pages
        payload["retries"] += record.retries
        if record.ok:
            for stage in STAGES if record.role == "decode" else PREFILL_STAGES:
                payload[f"{stage}_seconds"].append(getattr(record, f"{stage}_s"))
    payload["gauges"] = {name: getattr(stats, name) for name in GAUGES}
    return payload


def merge(older: Payload, newer: Payload) -> Payload:
    """Both together: counters and observations add up, gauges are the newer ones."""
    return {
        name: {**value, **newer[name]} if isinstance(value, dict) else value + newer[name]
        for name, value in older.items()
    }


def is_empty(payload: Payload) -> bool:
    """Whether it holds no transfers and no gauges."""
    return not any(payload.values())


def summary(payload: Payload) -> dict[str, int | float]:
    """For vLLM's periodic log line."""
    line: dict[str, int | float] = {outcome: payload[outcome] for outcome in OUTCOMES if payload[outcome]}
    if payload["ok"]:
        line["MB"] = round(payload["bytes"] / 1e6, 3)
        for stage in STAGES:
            if seconds := payload[f"{stage}_seconds"]:
                line[f"mean {stage} (ms)"] = round(1e3 * mean(seconds), 3)
    return line
