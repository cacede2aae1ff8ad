"""Runs real vLLM with tpu-inference on JAX's CPU backend: for tests and demos on machines without a TPU.

Switched on by `SGL_PD_CPU_EMULATION=1`, together with `JAX_PLATFORMS=cpu`, and applied by this package's vLLM
plugin in every process of the engine. Scheduler, runner, model code, KV cache layout and KV connectors are the real
ones; replaced are only the few functions that ask a TPU about itself and the TPU kernels.

Everything here leans on internals of tpu-inference, so it is bound to the versions it was made for and says so on
others.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgl_pd_connector.errors import PDError
from sgl_pd_connector.testing.cpu_attention import ragged_paged_attention
from sgl_pd_connector.testing.hardware import tpu_chips

ENVIRONMENT_VARIABLE = "SGL_PD_CPU_EMULATION"
TPU_INFERENCE_VERSIONS = ("0.32.0",)

# What the emulated device says it has. The KV pool is made as large as fits, so this bounds the server's memory;
# `--num-gpu-blocks-override` sets the pool's size exactly.
DEVICE_MEMORY_BYTES = 256 * 1024**2

logger = logging.getLogger(__name__)


class EmulationError(PDError):
    """CPU emulation cannot be used here."""


@dataclass(frozen=True)
class Patch:
    """One function of tpu-inference that does not work without a TPU.

    `bound_in` names modules that import the function by name; they are changed too if they are loaded already, and
    otherwise pick the replacement up when they are.
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    why: str
    bound_in: tuple[str, ...] = ()

    def apply(self) -> None:
        home = importlib.import_module(self.module)
        if not hasattr(home, self.name):
            raise EmulationError(f"{self.module}.{self.name} does not exist: {_other_version()}")
        for module in (home, *(sys.modules[name] for name in self.bound_in if name in sys.modules)):
            setattr(module, self.name, self.replacement)
        logger.debug("CPU emulation replaced %s.%s: %s", self.module, self.name, self.why)


@functools.cache
def install() -> None:
    """Make tpu-inference run on the CPU in this process. A second call does nothing.

    Raises:
        EmulationError: a TPU is present, JAX is not restricted to the CPU, or tpu-inference is not a known version.
    """
    _check_surroundings()
    for patch in PATCHES:
        patch.apply()
    _drop_tpu_compiler_options()
    logger.warning(
        "%s is set: tpu-inference runs on the CPU with replaced kernels. For tests and demos only: nothing measured "
        "here says anything about a TPU.",
        ENVIRONMENT_VARIABLE,
    )


def _check_surroundings() -> None:
    chips = tpu_chips()
    if chips:
        raise EmulationError(
            f"{ENVIRONMENT_VARIABLE} is set on a machine with {len(chips)} TPU chips: unset it to use them"
        )
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        raise EmulationError(
            f"{ENVIRONMENT_VARIABLE} needs JAX_PLATFORMS=cpu, which is {os.environ.get('JAX_PLATFORMS')!r}"
        )
    if importlib.metadata.version("tpu-inference") not in TPU_INFERENCE_VERSIONS:
        raise EmulationError(_other_version())


def _other_version() -> str:
    return (
        f"CPU emulation was made for tpu-inference {' or '.join(TPU_INFERENCE_VERSIONS)}, found "
        f"{importlib.metadata.version('tpu-inference')}"
    )


def _make_mesh(
    axis_shapes: Sequence[int], axis_names: Sequence[str], *, devices: Sequence[Any] | None = None
) -> jax.sharding.Mesh:
    axis_types = (jax.sharding.AxisType.Auto,) * len(axis_shapes)
    return jax.make_mesh(tuple(axis_shapes), tuple(axis_names), axis_types, devices=devices)


def _device_put(
    tensor: Any, sharding: jax.sharding.Sharding, *, layout: Any = None, source_mesh: Any = None
) -> Any:
    """Put arrays on the device, those of NumPy as copies."""
    owned = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tensor)
    return jax.device_put(owned, sharding)


def _device_name(num_devices: int | None = None) -> str:
    return "TPU v5e" if num_devices is None else f"TPU v5e-{num_devices}"


def _memory(devices: Sequence[Any]) -> list[tuple[int, int]]:
    return [(0, DEVICE_MEMORY_BYTES) for _ in devices]


def _refuse_head_dim_64(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "CPU emulation has no attention for head_dim 64: use 128, or another multiple of it"
    )


def _multi_layer_copy(
    *,
    src_array: list[jax.Array],
    dest_array: list[jax.Array],
    src_offsets: jax.Array,
    dest_offsets: jax.Array,
    chunk_sizes: jax.Array,
    num_chunks: jax.Array | None = None,
    **_: Any,
) -> list[jax.Array]:
    """Copy runs of pages from each source array into the destination array of the same layer."""
    count = len(chunk_sizes) if num_chunks is None else int(num_chunks[0])
    starts = zip(
        src_offsets[:count].tolist(), dest_offsets[:count].tolist(), chunk_sizes[:count].tolist(), strict=True
    )
    runs = [(range(src, src + size), range(dest, dest + size)) for src, dest, size in starts]
    src_pages = jnp.asarray([page for run, _ in runs for page in run], jnp.int32)
    dest_pages = jnp.asarray([page for _, run in runs for page in run], jnp.int32)
    copied: list[jax.Array] = _copy_pages(src_array, dest_array, src_pages, dest_pages)
    return copied


@jax.jit(donate_argnames="dest_array")
def _copy_pages(
    src_array: list[jax.Array], dest_array: list[jax.Array], src_pages: jax.Array, dest_pages: jax.Array
) -> list[jax.Array]:
    return [dest.at[dest_pages].set(src[src_pages]) for src, dest in zip(src_array, dest_array, strict=True)]


def _drop_tpu_compiler_options() -> None:
    """Some of tpu-inference's jits carry `xla_tpu_*` options, which the CPU compiler refuses.

    They are given in decorators, so there is no function to replace; JAX's own translation of options is the one
    place that all of them pass.
    """
    from jax._src import compiler

    original = compiler.get_compile_options

    def get_compile_options(*args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("env_options_overrides") or {}
        kept = {name: value for name, value in options.items() if not name.startswith("xla_tpu")}
        return original(*args, **{**kwargs, "env_options_overrides": kept})

    compiler.get_compile_options = get_compile_options


PATCHES = (
    Patch(
        "tpu_inference.utils",
        "make_optimized_mesh",
        _make_mesh,
        "sorts devices by their coordinates, which CPU devices do not have",
        bound_in=("tpu_inference.runner.tpu_runner",),
    ),
    Patch(
        "tpu_inference.utils",
        "general_device_put",
        _device_put,
        "the runner prepares every step in the same NumPy buffer, and on the CPU a device array may be that buffer: "
        "with asynchronous scheduling the next step then overwrites the input of the one that is running",
    ),
    Patch("tpu_inference.utils", "get_device_name", _device_name, "accepts TPUs only"),
    Patch("tpu_inference.utils", "hbm_usage_bytes", _memory, "CPU devices report no memory statistics"),
    Patch(
        "tpu_inference.distributed.utils",
        "get_device_topology_order_id",
        lambda local_devices, global_devices: 0,
        "orders hosts by device coordinates",
        bound_in=("tpu_inference.worker.tpu_worker",),
    ),
    Patch(
        "tpu_inference.layers.common.attention_interface",
        "ragged_paged_attention",
        ragged_paged_attention,
        "a TPU kernel",
    ),
    Patch(
        "tpu_inference.layers.common.attention_interface",
        "ragged_paged_attention_hd64",
        _refuse_head_dim_64,
        "a TPU kernel whose cache layout is a different one",
    ),
    Patch(
        "tpu_inference.distributed.kv_transfer",
        "multi_layer_copy",
        _multi_layer_copy,
        "a TPU kernel, used by the stock TPUConnector",
        bound_in=("tpu_inference.distributed.tpu_connector",),
    ),
)
