"""Everything here leans on internals of vLLM or tpu-inference. Known versions: vllm-tpu 0.32.0, tpu-inference 0.32.0.

==================== ================================================ =============================================
entry                why                                              not needed once
==================== ================================================ =============================================
register_connector   vLLM refuses a second registration of a name,    the factory ignores an equal registration
                     and loads plugins more than once
accept_on_tpu        `TpuPlatform.check_and_update_config` compares   tpu-inference asks `KVConnectorFactory`, or
                     the connector's name with a tuple of its own     keeps the tuple where plugins can extend it
install_middleware   routers put fields at the top of the body, which vLLM keeps unknown top-level fields, or has an
                     vLLM's request models drop; an endpoint plugin   entry point for middleware that is not opt-in
                     loads only when VLLM_PLUGINS names it
share_logging        vLLM configures the logger "vllm" alone          it configures plugins' loggers, or the root
role_of_app          an ASGI middleware is built without arguments    `--middleware` accepts arguments
==================== ================================================ =============================================

None of them changes anything for a server that does not use this connector.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.vllm.rewrite import Role

CONNECTOR = "SglJaxConnector"
CONNECTOR_MODULE = "sgl_pd_connector.vllm.connector"
MIDDLEWARE = "sgl_pd_connector.vllm.middleware.PDMiddleware"
ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode"}
KNOWN_VERSIONS = {"vllm-tpu": ("0.32.0",), "tpu-inference": ("0.32.0",)}

# A connector that tpu-inference accepts and treats in no special way; it stands in for ours during one check.
_STAND_IN = "TPUConnector"
_APP_MODULE = "vllm.entrypoints.launchers.app"


def check_versions() -> None:
    """Raises `ConfigError` unless the installed engine is one that this module was written for."""
    for package, known in KNOWN_VERSIONS.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed = "not installed"
        if installed not in known:
            raise ConfigError(
                f"{CONNECTOR} needs {package} {' or '.join(known)}, found: {installed}; "
                "install 'sgl-pd-connector[vllm]', or remove kv_connector from --kv-transfer-config"
            )


def uses_our_connector(vllm_config: Any) -> bool:
    """Whether a ``VllmConfig`` names our connector."""
    kv_transfer_config = getattr(vllm_config, "kv_transfer_config", None)
    return getattr(kv_transfer_config, "kv_connector", None) == CONNECTOR


def register_connector() -> None:
    """Makes ``"kv_connector": "SglJaxConnector"`` known to vLLM, without importing it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)


def accept_on_tpu(on_use: Callable[[Any], None]) -> None:
    """Gets our connector past tpu-inference's list of names.

    Args:
        on_use: called with the ``VllmConfig`` of a server that uses our connector, once its platform has completed
            it, in each process that builds the configuration. It may refuse by raising.
    """
    if importlib.util.find_spec("tpu_inference") is None:
        return
    from tpu_inference.platforms.tpu_platform import TpuPlatform

    original = inspect.getattr_static(TpuPlatform, "check_and_update_config", None)
    if not isinstance(original, classmethod) or hasattr(original.__func__, "accepts_sgl_pd"):
        return

    @functools.wraps(original.__func__)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        if not uses_our_connector(vllm_config):
            original.__func__(cls, vllm_config)
            return
        kv_transfer_config = vllm_config.kv_transfer_config
        kv_transfer_config.kv_connector = _STAND_IN
        try:
            original.__func__(cls, vllm_config)
        finally:
            kv_transfer_config.kv_connector = CONNECTOR
        on_use(vllm_config)

    check_and_update_config.accepts_sgl_pd = True  # type: ignore[attr-defined]
    TpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def in_api_server() -> bool:
    """Whether this process builds vLLM's HTTP application: it has imported the module that does."""
    return _APP_MODULE in sys.modules


def install_middleware() -> None:
    """Adds `PDMiddleware` to the HTTP application of this process, unless ``--middleware`` names it.

    It becomes the innermost one: a request is authenticated before its body is read.
    """
    app_module = sys.modules[_APP_MODULE]
    original = app_module.init_entrypoints_middleware
    if hasattr(original, "adds_sgl_pd"):
        return

    @functools.wraps(original)
    def init_entrypoints_middleware(args: Any, app: Any, *more: Any, **named: Any) -> None:
        if MIDDLEWARE not in args.middleware:
            from sgl_pd_connector.vllm.middleware import PDMiddleware

            app.add_middleware(PDMiddleware)
        original(args, app, *more, **named)

    init_entrypoints_middleware.adds_sgl_pd = True  # type: ignore[attr-defined]
    app_module.init_entrypoints_middleware = init_entrypoints_middleware  # type: ignore[attr-defined]


def role_of_app(app: Any) -> Role | None:
    """What the server of a vLLM application does, or None when it does not use our connector."""
    vllm_config: Any = getattr(app.state, "vllm_config", None)
    return ROLES.get(vllm_config.kv_transfer_config.kv_role) if uses_our_connector(vllm_config) else None


def share_logging() -> None:
    """Sends this package's log to where vLLM's goes, at vLLM's level, unless it was configured otherwise."""
    ours, theirs = logging.getLogger("sgl_pd_connector"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.setLevel(theirs.level)
        ours.propagate = False
        for handler in theirs.handlers:
            ours.addHandler(handler)
