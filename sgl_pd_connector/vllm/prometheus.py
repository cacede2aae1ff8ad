"""The payloads of `stats` as vLLM's classes: its log line and its ``/metrics``."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from sgl_pd_connector.vllm import stats

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class SglJaxStats(KVConnectorStats):  # type: ignore[misc] # vLLM is not installed where this is checked
    """One payload, with the operations vLLM wants of it."""

    def __init__(self, data: stats.Payload | None = None) -> None:
        super().__init__(data=data or stats.empty())

    def reset(self) -> None:
        self.data = stats.empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = stats.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return stats.summary(self.data)

    def is_empty(self) -> bool:
        return stats.is_empty(self.data)


class SglJaxPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc] # as above
    """``vllm:sgl_pd_*``, one child per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram, gauge = metric_types[Counter], metric_types[Histogram], metric_types[Gauge]
        self._engines = per_engine_labelvalues
        self._transfers = counter(
            name="vllm:sgl_pd_transfers",
            documentation="Finished KV transfers, by outcome.",
            labelnames=[*labelnames, "outcome"],
        )
        self._counters = {
            name: counter(name=f"vllm:sgl_pd_{name}", documentation=text, labelnames=labelnames)
            for name, text in stats.COUNTERS.items()
        }
        self._stages = histogram(
            name="vllm:sgl_pd_stage_seconds",
            documentation="Duration of each stage of a transfer that was ok: meeting the peer (bootstrap), "
            "waiting for prefill or for pages (input), everything after that (transfer), and of it the part "
            "until all was pulled (pull).",
            labelnames=[*labelnames, "stage"],
            buckets=SECONDS,
        )
        self._gauges = {
            name: gauge(
                name=f"vllm:sgl_pd_{name}",
                documentation=text,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in stats.GAUGES.items()
        }
        # Series exist from the start: a rate over a counter that appears at its first failure shows nothing.
        for labels in per_engine_labelvalues.values():
            for outcome in stats.OUTCOMES:
                self._transfers.labels(*labels, outcome)
            for metric in (*self._counters.values(), *self._gauges.values()):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: stats.Payload, engine_idx: int = 0) -> None:
        labels = self._engines[engine_idx]
        for outcome in stats.OUTCOMES:
            self._transfers.labels(*labels, outcome).inc(transfer_stats_data[outcome])
        for name, metric in self._counters.items():
            metric.labels(*labels).inc(transfer_stats_data[name])
        for stage in stats.STAGES:
            for seconds in transfer_stats_data[f"{stage}_seconds"]:
                self._stages.labels(*labels, stage).observe(seconds)
        for name, value in transfer_stats_data["gauges"].items():
            self._gauges[name].labels(*labels).set(value)
