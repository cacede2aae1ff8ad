"""`SglJaxConnector`: vLLM's hooks, each handed on to the half that does the work.

vLLM makes one connector in the scheduler and one in the worker. Everything here is glue: no hook lets an
exception out, because one raised in a hook ends the engine and with it every other request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from multiprocessing import util
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from sgl_pd_connector.vllm import stats, support
from sgl_pd_connector.vllm.metadata import StepMetadata, WorkerMetadata
from sgl_pd_connector.vllm.prometheus import SglJaxPromMetrics, SglJaxStats
from sgl_pd_connector.vllm.scheduler import DecodeScheduler, PrefillScheduler, SchedulerSide
from sgl_pd_connector.vllm.worker import DecodeWorker, PrefillWorker, RunnerPools, StepResult, WorkerSide
from sgl_pd_connector.wire.address import Address

if TYPE_CHECKING:
    from sgl_pd_connector.transfer.manager import JaxTransferKVManager

logger = logging.getLogger(__name__)

# Both are marker classes to vLLM; ours stay importable without it.
KVConnectorMetadata.register(StepMetadata)
KVConnectorWorkerMetadata.register(WorkerMetadata)


def _contained[F: Callable[..., Any]](default: Callable[[], Any]) -> Callable[[F], F]:
    """Makes a hook log what it raises and answer ``default()`` instead."""

    def decorate(hook: F) -> F:
        @wraps(hook)
        def contained(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                logger.exception("SglJaxConnector.%s failed; the engine goes on without it", hook.__name__)
                return default()

        return cast(F, contained)

    return decorate


class SglJaxConnector(KVConnectorBase_V1):  # type: ignore[misc] # vLLM is not installed where this is checked
    """Moves prompts' KV caches from prefill servers (``kv_producer``) to decode servers (``kv_consumer``)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """
        Raises:
            ConfigError: a setting is wrong, or the engine is set up in a way that is not supported.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = support.check(vllm_config)
        support.check_cache(kv_cache_config)
        self._is_prefill: bool = vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._page_size: int = vllm_config.cache_config.block_size
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._manager: JaxTransferKVManager | None = None
        self._at_exit: util.Finalize | None = None
        self._result = StepResult()
        self._gauges: dict[str, int] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(vllm_config.kv_transfer_config.kv_load_failure_policy)

    def _make_scheduler(self, failure_policy: str) -> SchedulerSide:
        if self._is_prefill:
            config = self._config
            own = Address.of(config.host, config.bootstrap_port, setting="host")
            return PrefillScheduler(self._page_size, config.bootstrap_addr or str(own))
        return DecodeScheduler(
            self._page_size, self._config.bootstrap_addr, recompute_failures=failure_policy == "recompute"
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False

    # Scheduler side, in the order a request meets them.

    @_contained(lambda: None)
    def on_new_request(self, request: Any) -> None:
        self._of_scheduler().add(request)

    @_contained(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._of_scheduler().matched_tokens(request, num_computed_tokens)

    @_contained(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    @_contained(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._of_scheduler().build(scheduler_output)

    @_contained(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta or WorkerMetadata()
        self._of_scheduler().update(said, connector_output.finished_recving or set())

    @_contained(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._of_scheduler().finished(request)

    def _of_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler-side hook was called on the worker side"
        return self._scheduler

    # Worker side, in the order of a step.

    def register_runner(self, runner: Any) -> None:
        """tpu-inference's runner, once its caches exist. Compiles, registers, and from then on serves.

        Raises:
            ConfigError: the caches are not of a kind this version moves.
        """
        # vLLM imports this module in its API server too, where JAX and the servers have no business.
        from sgl_pd_connector.transfer.manager import JaxTransferKVManager
        from sgl_pd_connector.transfer.pool import kv_args

        pools = RunnerPools(runner)
        self._manager = JaxTransferKVManager(
            kv_args(pools.get_pools(), self._page_size),
            self._config.bootstrap_addr,
            role="prefill" if self._is_prefill else "decode",
            config=self._config,
        )
        # tpu-inference's worker has no shutdown hook. Not `atexit`, which a forked engine process does not run.
        self._at_exit = util.Finalize(None, self._manager.close, exitpriority=1)
        self._manager.register_runner(pools)
        self._worker = (PrefillWorker if self._is_prefill else DecodeWorker)(self._manager)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called once per step, after its forward was dispatched: no load is in time for its own step."""
        self._result = self._step()

    @_contained(StepResult)
    def _step(self) -> StepResult:
        assert self._worker is not None, "a step before register_runner"
        return self._worker.step(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(
            finished_sending=self._result.finished_sending,
            finished_recving=self._result.finished_recving,
            failed_recving=self._result.failed_recving,
        )

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        return self._result.metadata or None

    @_contained(lambda: None)
    def get_kv_connector_stats(self) -> SglJaxStats | None:
        if self._manager is None:
            return None
        records = self._manager.take_records()
        payload = stats.collect(records, self._manager.stats())
        if not records and payload["gauges"] == self._gauges:
            return None
        self._gauges = payload["gauges"]
        for record in records:
            logger.debug("transfer over: %s", record)
        return SglJaxStats(payload)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SglJaxStats:
        return SglJaxStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SglJaxPromMetrics:
        return SglJaxPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        self._manager = None
        if self._at_exit is not None:
            self._at_exit()  # once
