"""The plugin and its patches, on stand-ins for the few names of vLLM and tpu-inference that they touch."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import logging
import multiprocessing
import socket
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.vllm import compat, plugin
from sgl_pd_connector.vllm.middleware import PDMiddleware

pytestmark = pytest.mark.unit


class Engine:
    """What a process of vLLM on tpu-inference looks like to the plugin."""

    def __init__(self, add_module: Callable[..., types.ModuleType]) -> None:
        checked: list[str] = []

        class TpuPlatform:
            @classmethod
            def check_and_update_config(cls, vllm_config: Any) -> None:
                checked.append(vllm_config.kv_transfer_config.kv_connector)
                if vllm_config.kv_transfer_config.kv_connector not in ("TPUConnector", "TPUOffloadConnector"):
                    raise ValueError("Unsupported kv_connector")

        class KVConnectorFactory:
            _registry: ClassVar[dict[str, Any]] = {}

            @classmethod
            def register_connector(cls, name: str, module: str, class_name: str) -> None:
                assert name not in cls._registry, "already registered"
                cls._registry[name] = (module, class_name)

        def init_entrypoints_middleware(args: Any, app: Any, supported_tasks: Any) -> None:
            app.add_middleware("authentication")

        self.checked = checked
        self.platform = TpuPlatform
        self.registry = KVConnectorFactory._registry
        self._add_module = add_module
        self._init_middleware = init_entrypoints_middleware
        add_module("tpu_inference.platforms.tpu_platform", TpuPlatform=TpuPlatform)
        factory = "vllm.distributed.kv_transfer.kv_connector.factory"
        add_module(factory, KVConnectorFactory=KVConnectorFactory)

    def becomes_api_server(self) -> Any:
        return self._add_module(
            "vllm.entrypoints.launchers.app", init_entrypoints_middleware=self._init_middleware
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    def add_module(name: str, **members: Any) -> types.ModuleType:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                module = types.ModuleType(path)
                module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
                monkeypatch.setitem(sys.modules, path, module)
        vars(sys.modules[name]).update(members)
        return sys.modules[name]

    versions = {"vllm-tpu": "0.32.0", "tpu-inference": "0.32.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    return Engine(add_module)


def server(connector: str = "SglJaxConnector", role: str = "kv_consumer", **extra: Any) -> Any:
    kv = SimpleNamespace(kv_connector=connector, kv_role=role, kv_connector_extra_config=extra)
    parallel = SimpleNamespace(
        pipeline_parallel_size=1,
        data_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    return SimpleNamespace(
        kv_transfer_config=kv,
        parallel_config=parallel,
        additional_config={},
        speculative_config=None,
        model_config=SimpleNamespace(use_mla=False),
    )


def test_the_connector_is_known_and_registering_again_is_harmless(engine: Engine) -> None:
    plugin.register()
    plugin.register()
    assert engine.registry == {"SglJaxConnector": ("sgl_pd_connector.vllm.connector", "SglJaxConnector")}


class TestThePlatformsCheck:
    def test_our_connector_passes_it_and_keeps_its_name(self, engine: Engine) -> None:
        plugin.register()
        plugin.register()
        config = server()
        engine.platform.check_and_update_config(config)
        assert engine.checked == ["TPUConnector"]
        assert config.kv_transfer_config.kv_connector == "SglJaxConnector"

    def test_others_meet_it_unchanged(self, engine: Engine) -> None:
        plugin.register()
        with pytest.raises(ValueError, match="Unsupported kv_connector"):
            engine.platform.check_and_update_config(server("NixlConnector"))

    def test_what_else_it_refuses_is_still_refused(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compat, "_STAND_IN", "gone in this version")
        plugin.register()
        config = server()
        with pytest.raises(ValueError, match="Unsupported kv_connector"):
            engine.platform.check_and_update_config(config)
        assert config.kv_transfer_config.kv_connector == "SglJaxConnector"


class TestWrongSettings:
    def check(self, engine: Engine, config: Any) -> None:
        plugin.register()
        engine.platform.check_and_update_config(config)

    def test_a_server_ends_with_one_line(self, engine: Engine) -> None:
        engine.becomes_api_server()
        with pytest.raises(SystemExit) as caught:
            self.check(engine, server(role="kv_both"))
        assert str(caught.value).startswith("SglJaxConnector: kv_role = kv_both: a server is either")
        assert "\n" not in str(caught.value)

    def test_a_program_gets_an_exception(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match="kv_role = kv_both"):
            self.check(engine, server(role="kv_both"))

    def test_an_unknown_setting_is_named(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match="kv_connector_extra_config: unknown setting 'laese'"):
            self.check(engine, server(laese=3))

    @pytest.mark.parametrize("package", ["vllm-tpu", "tpu-inference"])
    def test_an_unknown_version_is_named(
        self, engine: Engine, package: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        versions = {"vllm-tpu": "0.32.0", "tpu-inference": "0.32.0", package: "0.99.0"}
        monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
        with pytest.raises(
            ConfigError, match=rf"{package} 0\.32\.0, found: 0\.99\.0.*sgl-pd-connector\[vllm\]"
        ):
            self.check(engine, server())

    def test_a_missing_extra_is_named(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(package: str) -> str:
            raise importlib.metadata.PackageNotFoundError(package)

        monkeypatch.setattr(importlib.metadata, "version", missing)
        with pytest.raises(ConfigError, match="not installed; install 'sgl-pd-connector"):
            self.check(engine, server())

    def test_the_rust_front_end_is_refused(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
        with pytest.raises(ConfigError, match="VLLM_USE_RUST_FRONTEND"):
            self.check(engine, server())


class TestHost:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::"])
    def test_all_interfaces_are_no_address_for_peers(self, host: str) -> None:
        with pytest.raises(ConfigError, match="cannot mean all interfaces"):
            plugin.check_server(server(host=host, allow_insecure=True))

    def test_another_than_loopback_needs_a_secret(self) -> None:
        with pytest.raises(ConfigError, match="there is no secret"):
            plugin.check_server(server(host="10.0.0.1"))


class TestPortsInUse:
    @pytest.fixture
    def taken(self) -> Any:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            yield holder.getsockname()[1]

    @pytest.mark.parametrize("setting", ["bootstrap_port", "side_channel_port", "transfer_port"])
    def test_prefill_names_the_setting(self, setting: str, taken: int) -> None:
        elsewhere = {} if setting == "bootstrap_port" else {"bootstrap_addr": "10.0.0.1:8998"}
        config = server(role="kv_producer", **elsewhere, **{setting: taken})
        with pytest.raises(ConfigError, match=f"{setting} = {taken}: cannot listen on 127.0.0.1:{taken}"):
            plugin.check_server(config)

    def test_decode_listens_on_none(self, taken: int) -> None:
        plugin.check_server(server(bootstrap_port=taken, side_channel_port=taken))

    def test_nor_does_prefill_on_the_port_of_a_bootstrap_elsewhere(self, taken: int) -> None:
        extra = {"bootstrap_port": taken, "bootstrap_addr": "10.0.0.1:8998"}
        plugin.check_server(server(role="kv_producer", **extra))

    def test_children_do_not_look(self, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(multiprocessing, "parent_process", object)
        plugin.check_server(server(role="kv_producer", bootstrap_port=taken))


class TestTheMiddleware:
    def build(self, engine: Engine, config: Any, *named: str) -> list[Any]:
        """The middleware of an application, outermost last, as vLLM builds it after its configuration."""
        module = engine.becomes_api_server()
        plugin.register()
        for _ in range(2):  # vLLM may build its configuration more than once
            engine.platform.check_and_update_config(config)
        added: list[Any] = []
        app = SimpleNamespace(add_middleware=added.append)
        module.init_entrypoints_middleware(SimpleNamespace(middleware=list(named)), app, ("generate",))
        return added

    def test_it_is_the_innermost(self, engine: Engine) -> None:
        assert self.build(engine, server()) == [PDMiddleware, "authentication"]

    def test_it_is_not_added_when_the_command_line_names_it(self, engine: Engine) -> None:
        assert self.build(engine, server(), compat.MIDDLEWARE) == ["authentication"]

    def test_other_connectors_do_not_get_it(self, engine: Engine) -> None:
        assert self.build(engine, server("TPUConnector")) == ["authentication"]

    def test_the_name_for_the_command_line_is_right(self) -> None:
        module, _, name = compat.MIDDLEWARE.rpartition(".")
        assert getattr(sys.modules[module], name) is PDMiddleware


@pytest.mark.parametrize(("connector", "role"), [("SglJaxConnector", "decode"), ("TPUConnector", None)])
def test_an_applications_role_is_that_of_its_server(connector: str, role: str | None) -> None:
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=server(connector)))
    assert compat.role_of_app(app) == role


def test_an_application_of_something_else_has_no_role() -> None:
    assert compat.role_of_app(SimpleNamespace(state=SimpleNamespace())) is None


def test_our_log_goes_there_though_vllm_sets_it_up_after_plugins(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = logging.Logger("sgl_pd_connector"), logging.Logger("vllm")
    loggers = {"sgl_pd_connector": ours, "vllm": theirs}
    monkeypatch.setattr(compat, "logging", SimpleNamespace(getLogger=loggers.__getitem__))
    plugin.register()
    handler = logging.NullHandler()
    theirs.addHandler(handler)
    engine.platform.check_and_update_config(server())
    assert ours.handlers == [handler]


def test_our_log_goes_where_vllms_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = logging.Logger("sgl_pd_connector"), logging.Logger("vllm", logging.DEBUG)
    loggers = {"sgl_pd_connector": ours, "vllm": theirs}
    monkeypatch.setattr(compat, "logging", SimpleNamespace(getLogger=loggers.__getitem__))
    compat.share_logging()
    assert not ours.handlers
    handler = logging.NullHandler()
    theirs.addHandler(handler)
    compat.share_logging()
    compat.share_logging()
    assert (ours.handlers, ours.level, ours.propagate) == ([handler], logging.DEBUG, False)
