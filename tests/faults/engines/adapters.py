"""What differs between the engines: their flags, and where they say how they stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import httpx

from sgl_pd_connector.testing.engines import ENGINES, Engine, FailurePolicy, Role, SglJaxEngine, VllmEngine
from sgl_pd_connector.testing.servers import Server

PREFILL_STEP = 64
"""Tokens that P prefills at a time: a long prompt takes many steps, and those behind it wait."""

GAUGES = ("in_flight", "packed_bytes", "registered_bytes", "pulled_bytes", "waiting_sends")
"""The connector's, all 0 when nothing is going on."""

OUTCOMES = ("ok", "failed", "timeout", "aborted")

ASK = httpx.Timeout(30.0)


class Adapter(Protocol):
    """One engine.

    Attributes:
        lengths: tokens of prompt and answer of the request that is to be met in each state. A long prompt is prefilled
            in several steps, and what is queued waits behind it; a long answer outlasts all that.
    """

    lengths: Mapping[str, tuple[int, int]]

    def engine(self, role: Role, policy: FailurePolicy) -> Engine:
        """Makes P, or a D with this policy."""

    def wake(self, server: Server, model: str) -> None:
        """Has an idle server bring up to date what `standing` reads."""

    def standing(self, server: Server) -> Mapping[str, float]:
        """Pages, queues and `GAUGES`: everything that must be 0 when nothing is going on."""

    def ended(self, server: Server) -> Mapping[str, float]:
        """Transfers that have ended since it was started, by `OUTCOMES`."""


class Vllm:
    """vLLM says it in ``/metrics``, as of its last step."""

    lengths: Mapping[str, tuple[int, int]] = {
        "queued": (20, 8),
        "prefilling": (700, 8),
        "transferring": (100, 12),
        "decoding": (40, 900),
    }
    _NAMES: Mapping[str, str] = {
        name: f"vllm:{name}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    } | {name: f"vllm:sgl_pd_{name}" for name in GAUGES}

    def engine(self, role: Role, policy: FailurePolicy) -> Engine:
        made = ENGINES["vllm"](None)
        assert isinstance(made, VllmEngine)
        flags = [*made.extra_args, "--num-gpu-blocks-override", "400"]
        if role == "prefill":
            flags += ["--max-num-batched-tokens", str(PREFILL_STEP)]
        return replace(made, extra_args=flags, failure_policy=policy)

    def wake(self, server: Server, model: str) -> None:
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        httpx.post(server.url + "/v1/completions", json=body, timeout=ASK).raise_for_status()

    def standing(self, server: Server) -> Mapping[str, float]:
        metrics = self._metrics(server)
        return {name: metrics.get(series, 0.0) for name, series in self._NAMES.items()}

    def ended(self, server: Server) -> Mapping[str, float]:
        series = self._metrics(server, labels=True)
        return {
            outcome: sum(
                value
                for name, value in series.items()
                if name.startswith("vllm:sgl_pd_transfers_total{") and f'outcome="{outcome}"' in name
            )
            for outcome in OUTCOMES
        }

    @staticmethod
    def _metrics(server: Server, *, labels: bool = False) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in httpx.get(server.url + "/metrics", timeout=ASK).text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.startswith("vllm:"):
                found[series if labels else series.partition("{")[0]] = float(value)
        return found


class SglJax:
    """sgl-jax answers from its scheduler. On a CPU one of its steps takes as long as thirty of vLLM's."""

    lengths: Mapping[str, tuple[int, int]] = {
        "queued": (20, 4),
        "prefilling": (130, 4),
        "transferring": (40, 4),
        "decoding": (20, 60),
    }
    _TOKENS = 4096
    _BOOKS = ("running_batch_size", "waiting_queue_size", "req_to_token_pool_used")

    def engine(self, role: Role, policy: FailurePolicy) -> Engine:
        made = ENGINES["sgl-jax"](None)
        assert isinstance(made, SglJaxEngine)
        flags = [*made.extra_args]
        if role == "prefill":
            flags += ["--chunked-prefill-size", str(PREFILL_STEP)]
        return replace(made, extra_args=flags, failure_policy=policy)

    def wake(self, server: Server, model: str) -> None:
        pass

    def standing(self, server: Server) -> Mapping[str, float]:
        state = self._state(server)
        free = state["available_kv_tokens"] + state["tree_cache_size"]
        return {
            **{name: state[name] for name in self._BOOKS},
            "tokens of the pool in use": self._TOKENS - free,
            **{name: state["kv_transfers"][name] for name in GAUGES},
        }

    def ended(self, server: Server) -> Mapping[str, float]:
        transfers = self._state(server)["kv_transfers"]
        return {outcome: transfers[outcome] for outcome in OUTCOMES}

    @staticmethod
    def _state(server: Server) -> dict[str, Any]:
        answer = httpx.get(server.url + "/get_server_info", timeout=ASK)
        state: dict[str, Any] = answer.json()["internal_states"][0]
        return state


ADAPTERS: Mapping[str, Callable[[], Adapter]] = {"vllm": Vllm, "sgl-jax": SglJax}
