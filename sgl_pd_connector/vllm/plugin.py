"""The ``vllm.general_plugins`` entry point: vLLM calls `register` in each of its processes, before anything else."""

from __future__ import annotations

import multiprocessing
import os
import socket
from dataclasses import replace
from typing import Any

from sgl_pd_connector.config import ConnectorConfig
from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.vllm import compat, support
from sgl_pd_connector.wire.address import Address, advertised
from sgl_pd_connector.wire.secret import require_secret


def register() -> None:
    """Makes vLLM know `SglJaxConnector`. Cheap, and harmless to call again or where the connector is not used."""
    compat.share_logging()
    if os.environ.get("SGL_PD_CPU_EMULATION", "0") not in ("", "0"):
        from sgl_pd_connector.testing import cpu_emulation

        cpu_emulation.install()
    compat.register_connector()
    compat.accept_on_tpu(_on_use)


def _on_use(vllm_config: Any) -> None:
    # Again: when plugins are loaded, vLLM has not configured its own log yet.
    compat.share_logging()
    try:
        compat.check_versions()
        check_server(vllm_config)
    except ConfigError as error:
        if compat.in_api_server():
            # The one place where a server can still say what is wrong in a line instead of a stack of two processes.
            raise SystemExit(f"{compat.CONNECTOR}: {error}") from None
        raise
    if compat.in_api_server():
        compat.install_middleware()


def check_server(vllm_config: Any) -> None:
    """Validates all that is known before an engine starts.

    Args:
        vllm_config: vLLM's ``VllmConfig`` of a server that uses our connector.

    Raises:
        ConfigError: the role, a setting, the engine's set-up or a port cannot be used as given.
    """
    config = support.check(vllm_config)
    host = advertised(config.host)
    require_secret(host, config.read_secret(), allow_insecure=config.allow_insecure)
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ConfigError("VLLM_USE_RUST_FRONTEND: that HTTP server has no middleware, set it to 0")
    # Only in the first process: in its children the engine may run already, and hold these ports.
    if vllm_config.kv_transfer_config.kv_role == "kv_producer" and multiprocessing.parent_process() is None:
        if config.bootstrap_addr is None:
            _check_free(host, config, "bootstrap_port")
        _check_free(host, config, "side_channel_port")
        _check_free(host, config, "transfer_port")


def _check_free(host: Address, config: ConnectorConfig, setting: str) -> None:
    port = getattr(config, setting)
    if port == 0:
        return
    address = replace(host, port=port)
    family = address.family
    assert family is not None, "resolved addresses are numeric"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do it, so that connections of a server that just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, port))
        except OSError as error:
            raise ConfigError(f"{setting} = {port}: cannot listen on {address}: {error.strerror}") from None
