"""Ratios of ours to the baseline, taken within a repeat, as medians over the repeats."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OURS, BASELINE = "sgl", "tpu_connector"


def serve_ratios(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By workload: TTFT and throughput of ours divided by TPUConnector's; ITL with transfers by without.

    A workload in which either had nothing to show (all requests failed) has no ratio.
    """
    found: dict[str, Any] = {}
    for workload in runs[0]["workloads"] if runs else ():
        figures = {
            "ttft_p50_ratio": _ratio(runs, workload, lambda each: each["ttft_s"]["p50"]),
            "ttft_p99_ratio": _ratio(runs, workload, lambda each: each["ttft_s"]["p99"]),
            "throughput_ratio": _ratio(runs, workload, lambda each: each["requests_per_s"]),
        }
        known = {name: value for name, value in figures.items() if value is not None}
        if known:
            found[workload] = known
    ours = [run for run in runs if run["system"] == OURS]
    if ours:
        found["itl_p99_ratio"] = statistics.median(
            run["itl"]["transfers"]["p99"] / run["itl"]["prefills"]["p99"]
            for run in ours
            if "prefills" in run["itl"]
        )
        found["compiles_after_warmup"] = int(sum(run["compiles_after_warmup"] for run in ours))
    found["failures"] = {
        system: sum(
            each["failures"] for run in runs if run["system"] == system for each in run["workloads"].values()
        )
        for system in dict.fromkeys(run["system"] for run in runs)
    }
    return found


def _ratio(
    runs: Sequence[Mapping[str, Any]], workload: str, figure: Callable[[Mapping[str, Any]], float]
) -> float | None:
    by_repeat: dict[int, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        by_repeat.setdefault(run["repeat"], {})[run["system"]] = run["workloads"][workload]
    pairs = [
        (systems[OURS], systems[BASELINE])
        for systems in by_repeat.values()
        if all("ttft_s" in systems.get(name, ()) for name in (OURS, BASELINE))
    ]
    return statistics.median(figure(ours) / figure(other) for ours, other in pairs) if pairs else None
