"""What is refused at start-up, and that each refusal names the setting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.vllm.support import check, check_cache

pytestmark = pytest.mark.unit


def vllm_config(role: str = "kv_producer", extra: dict[str, Any] | None = None, **changed: Any) -> Any:
    """What `check` reads of vLLM's configuration; ``changed``: ``section__field=value``."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role=role, kv_connector_extra_config=extra or {}),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        additional_config={},
        model_config=SimpleNamespace(use_mla=False),
        speculative_config=None,
    )
    for path, value in changed.items():
        section, _, field = path.rpartition("__")
        setattr(getattr(config, section) if section else config, field, value)
    return config


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_ordinary_engine_is_accepted_with_its_settings(role: str) -> None:
    assert check(vllm_config(role, {"lease": 12})).lease == 12


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (vllm_config("kv_both"), "kv_role = kv_both"),
        (vllm_config(extra={"leese": 12}), "kv_connector_extra_config: unknown setting 'leese'"),
        (vllm_config(extra={"bootstrap_port": 0}), "bootstrap_port = 0"),
        (vllm_config(parallel_config__pipeline_parallel_size=2), "--pipeline-parallel-size 2"),
        (vllm_config(parallel_config__data_parallel_size=2), "--data-parallel-size"),
        (
            vllm_config(additional_config={"sharding": {"sharding_strategy": {"enable_dp_attention": True}}}),
            "enable_dp_attention",
        ),
        (vllm_config(parallel_config__decode_context_parallel_size=2), "context parallelism"),
        (vllm_config(speculative_config=object()), "--speculative-config"),
        (vllm_config(model_config__use_mla=True), "MLA"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check(config)


def test_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_MULTIHOST_BACKEND", "ray")
    with pytest.raises(ConfigError, match="TPU_MULTIHOST_BACKEND=ray"):
        check(vllm_config())


def test_a_free_bootstrap_port_is_fine_when_the_bootstrap_server_runs_elsewhere() -> None:
    check(vllm_config(extra={"bootstrap_port": 0, "bootstrap_addr": "10.0.0.1:7080"}))
    check(vllm_config("kv_consumer", {"bootstrap_port": 0}))


def test_hybrid_models_are_refused() -> None:
    check_cache(SimpleNamespace(kv_cache_groups=[1]))
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        check_cache(SimpleNamespace(kv_cache_groups=[1, 2]))
