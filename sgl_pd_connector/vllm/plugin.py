"""The ``vllm.general_plugins`` entry point: vLLM calls `register` in each of its processes, before anything else."""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

from sgl_pd_connector.config import ConnectorConfig, load_config
from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.vllm import compat
from sgl_pd_connector.wire.address import Address


def register() -> None:
    """Makes vLLM know `SglJaxConnector`. Cheap, and harmless to call again or where the connector is not used."""
    compat.share_logging()
    compat.register_connector()
    compat.accept_on_tpu(_on_use)


def _on_use(vllm_config: Any) -> None:
    try:
        compat.check_versions()
        check_server(vllm_config.kv_transfer_config)
    except ConfigError as error:
        if compat.in_api_server():
            # The one place where a server can still say what is wrong in a line instead of a stack of two processes.
            raise SystemExit(f"{compat.CONNECTOR}: {error}") from None
        raise
    if compat.in_api_server():
        compat.install_middleware()


def check_server(kv_transfer_config: Any) -> ConnectorConfig:
    """Validates all that is known before an engine starts.

    Args:
        kv_transfer_config: vLLM's ``KVTransferConfig``, naming our connector.

    Raises:
        ConfigError: the role, a setting, or a port cannot be used as given.
    """
    role = compat.ROLES.get(kv_transfer_config.kv_role)
    if role is None:
        raise ConfigError(
            f"kv_role = {kv_transfer_config.kv_role!r} is not supported: use 'kv_producer' on the server that "
            "prefills and 'kv_consumer' on the one that decodes"
        )
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ConfigError("VLLM_USE_RUST_FRONTEND: that HTTP server has no middleware, set it to 0")
    config = load_config(
        kv_transfer_config.kv_connector_extra_config or {}, where="kv_connector_extra_config"
    )
    # Only in the first process: in its children the engine may run already, and hold these ports.
    if role == "prefill" and multiprocessing.parent_process() is None:
        if config.bootstrap_addr is None:
            _check_free(config, "bootstrap_port")
        _check_free(config, "side_channel_port")
        _check_free(config, "transfer_port")
    return config


def _check_free(config: ConnectorConfig, setting: str) -> None:
    port = getattr(config, setting)
    if port == 0:
        return
    address = Address.of(config.host, port, setting="host").resolved(setting="host")
    family = address.family
    assert family is not None, "resolved addresses are numeric"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do it, so that connections of a server that just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, port))
        except OSError as error:
            raise ConfigError(f"{setting} = {port}: cannot listen on {address}: {error.strerror}") from None
