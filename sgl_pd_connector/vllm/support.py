"""What this version does not do, said at start-up and by name instead of half done at run time."""

from __future__ import annotations

import os
from typing import Any

from sgl_pd_connector.config import ConnectorConfig, load_config
from sgl_pd_connector.errors import ConfigError

EXTRA_CONFIG = "kv_connector_extra_config"


def check(vllm_config: Any) -> ConnectorConfig:
    """Reads and checks everything that can be known before the engine starts.

    Args:
        vllm_config: ``vllm.config.VllmConfig`` with a ``kv_transfer_config``.

    Returns:
        The connector's settings.

    Raises:
        ConfigError: the settings are wrong, or the engine is set up in a way that is not supported.
    """
    transfer = vllm_config.kv_transfer_config
    config = load_config(transfer.kv_connector_extra_config, where=EXTRA_CONFIG)
    if transfer.kv_role not in ("kv_producer", "kv_consumer"):
        raise ConfigError(
            f"kv_role = {transfer.kv_role}: a server is either a prefill server (kv_producer) or a decode "
            "server (kv_consumer); start one of each"
        )
    if transfer.kv_role == "kv_producer" and config.bootstrap_addr is None and config.bootstrap_port == 0:
        raise ConfigError(
            f"{EXTRA_CONFIG}: bootstrap_port = 0: the router must be told the port, so give a number, or set "
            "bootstrap_addr to a bootstrap server that runs by itself"
        )
    for is_set, what in _unsupported(vllm_config):
        if is_set:
            raise ConfigError(f"SglJaxConnector does not support {what}")
    return config


def check_cache(kv_cache_config: Any) -> None:
    """Refuses models whose KV cache is more than one pool of pages.

    Args:
        kv_cache_config: ``vllm.v1.kv_cache_interface.KVCacheConfig``.

    Raises:
        ConfigError: the model is one of those.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"SglJaxConnector does not support models with {len(groups)} KV cache groups (hybrid attention, "
            "Mamba): their state is in more than one pool"
        )


def _unsupported(vllm_config: Any) -> list[tuple[bool, str]]:
    """Conditions on what the user set: tpu-inference has not derived its own settings from it yet."""
    parallel = vllm_config.parallel_config
    sharding = (vllm_config.additional_config or {}).get("sharding", {}).get("sharding_strategy", {})
    multihost = os.environ.get("TPU_MULTIHOST_BACKEND")
    return [
        (
            parallel.pipeline_parallel_size > 1,
            f"pipeline parallelism (--pipeline-parallel-size {parallel.pipeline_parallel_size}): each stage "
            "has its own layers",
        ),
        (
            parallel.data_parallel_size > 1 or bool(sharding.get("enable_dp_attention")),
            "data parallelism in one server (--data-parallel-size, enable_dp_attention): run several servers "
            "behind the router",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism: pages are split over devices by tokens",
        ),
        (bool(multihost), f"servers on several hosts (TPU_MULTIHOST_BACKEND={multihost})"),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding (--speculative-config): the drafter's cache is not transferred",
        ),
        (vllm_config.model_config.use_mla, "models with latent attention (MLA): not tested yet"),
    ]
