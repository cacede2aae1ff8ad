"""CPU emulation refuses where it does not belong and says why; the rest needs the engine, see tests/e2e/vllm."""

import importlib.metadata
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgl_pd_connector.testing import cpu_emulation
from sgl_pd_connector.testing.cpu_emulation import EmulationError, Patch

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def suitable_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(cpu_emulation, "tpu_chips", list)
    monkeypatch.setattr(importlib.metadata, "version", {"tpu-inference": "0.32.0"}.__getitem__)
    cpu_emulation.install.cache_clear()


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str, **members: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def test_refuses_a_machine_with_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_emulation, "tpu_chips", lambda: [0, 1])
    with pytest.raises(EmulationError, match="with 2 TPU chips: unset it"):
        cpu_emulation.install()


@pytest.mark.parametrize("platforms", [None, "tpu", "tpu,cpu"])
def test_refuses_a_jax_that_may_use_other_devices(
    monkeypatch: pytest.MonkeyPatch, platforms: str | None
) -> None:
    if platforms is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    else:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    with pytest.raises(EmulationError, match="needs JAX_PLATFORMS=cpu"):
        cpu_emulation.install()


def test_refuses_another_version_of_tpu_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"tpu-inference": "0.33.1"}.__getitem__)
    with pytest.raises(EmulationError, match=r"made for tpu-inference 0\.32\.0, found 0\.33\.1"):
        cpu_emulation.install()


def test_a_target_that_is_gone_is_named(fake_module: Any) -> None:
    fake_module("engine_utils")
    with pytest.raises(EmulationError, match=r"engine_utils\.device_name does not exist"):
        Patch("engine_utils", "device_name", lambda: "cpu", "why").apply()


def test_a_patch_reaches_loaded_modules_that_bound_the_name(fake_module: Any) -> None:
    home = fake_module("engine_utils", device_name=lambda: "tpu")
    loaded = fake_module("engine_runner", device_name=home.device_name)
    Patch(
        "engine_utils", "device_name", lambda: "cpu", "why", bound_in=("engine_runner", "engine_not_loaded")
    ).apply()
    assert home.device_name() == loaded.device_name() == "cpu"
    assert "engine_not_loaded" not in sys.modules


def test_installs_once_and_loudly(
    monkeypatch: pytest.MonkeyPatch, fake_module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from jax._src import compiler

    seen: list[Any] = []
    monkeypatch.setattr(compiler, "get_compile_options", lambda *_, **options: seen.append(options))
    home = fake_module("engine_utils", device_name=lambda: "tpu")
    patch = Patch("engine_utils", "device_name", lambda: "cpu", "why")
    monkeypatch.setattr(cpu_emulation, "PATCHES", (patch,))
    cpu_emulation.install()
    cpu_emulation.install()
    assert home.device_name() == "cpu"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tests and demos only" in caplog.text

    compiler.get_compile_options(env_options_overrides={"xla_tpu_fast": "true", "xla_cpu_fast": "true"})
    assert seen == [{"env_options_overrides": {"xla_cpu_fast": "true"}}]


def test_pages_are_copied_in_runs() -> None:
    """The replacement of the kernel with which the stock connector writes pulled pages into its pool."""
    source = [jnp.arange(20.0).reshape(5, 4) + 100 * layer for layer in range(2)]
    pool = [jnp.full((8, 4), float(-layer)) for layer in range(2)]
    expected = [np.array(pages) for pages in pool]
    for layer in range(2):
        expected[layer][6:8] = source[layer][0:2]
        expected[layer][1] = source[layer][2]
    copied = cpu_emulation._multi_layer_copy(
        src_array=source,
        dest_array=pool,
        src_offsets=jnp.array([0, 2, 0]),
        dest_offsets=jnp.array([6, 1, 0]),
        chunk_sizes=jnp.array([2, 1, 0]),
        num_chunks=jnp.array([2]),
        mesh=None,
    )
    jax.tree.map(np.testing.assert_array_equal, copied, expected)


def test_device_arrays_do_not_share_the_runners_buffers() -> None:
    """On the CPU, JAX makes an array of a well-aligned NumPy buffer without copying it."""
    room = np.zeros(1024 + 64, np.uint8)
    start = -room.ctypes.data % 64
    buffer = room[start : start + 1024].view(np.int32)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    shared = jax.device_put(buffer, sharding)
    (kept,) = cpu_emulation._device_put((buffer,), sharding)
    jax.block_until_ready((shared, kept))
    buffer[:] = 7
    assert int(np.asarray(shared)[0]) == 7, "if JAX copies, the replacement is not needed any more"
    assert not np.asarray(kept).any()
