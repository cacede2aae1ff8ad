"""Compiles gather, scatter and tpu-inference's `multi_layer_copy` for a TPU that is not attached.

    python tests/tpu_aot/compile_report.py v5e:2x2 >> rows.jsonl
    python tests/tpu_aot/compile_report.py table < rows.jsonl

The first prints one JSON object per compiled function: what `memory_analysis()` and the compiled HLO say. One
topology per process, libtpu is not made for more. Needs libtpu and tpu-inference: the 'vllm' environment. The second
prints the table of docs/ops.md.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    # libtpu would ask the cloud's metadata server what machine this is.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sgl_pd_connector.ops import backend, sharded
from sgl_pd_connector.wire.chunks import plan_groups

NUM_PAGES, N = 256, 64
BUFFER_BYTES = 16 << 20


class Shape(NamedTuple):
    """One layer's pool is `[NUM_PAGES, *page_shape]`, with `heads_axis` split over the devices."""

    layers: int
    page_shape: tuple[int, ...]
    dtype: Any
    heads_axis: int | None

    def on(self, devices: int) -> Shape:
        """Engines duplicate heads when there are fewer than devices."""
        if self.heads_axis is None:
            return self
        page_shape = list(self.page_shape)
        page_shape[self.heads_axis - 1] = max(page_shape[self.heads_axis - 1], devices)
        return self._replace(page_shape=tuple(page_shape))


SHAPES = {
    "Llama-3-8B": Shape(32, (16, 8, 2, 128), jnp.bfloat16, 2),
    "Llama-3-70B": Shape(80, (16, 8, 2, 128), jnp.bfloat16, 2),
    "Qwen3-32B fp8": Shape(64, (32, 4, 4, 128), jnp.float8_e4m3fn, 2),
    "DeepSeek-V3 (MLA)": Shape(61, (16, 2, 640), jnp.bfloat16, None),
    "head dim 64, pages of 256": Shape(16, (256, 8, 2, 64), jnp.bfloat16, 2),
}
# XLA lays these out with the tokens as the minor axis: the kernel has to see the pool in that order.
TOKENS_MINOR = {
    f"{np.dtype(dtype).name} {page_shape}": Shape(2, page_shape, dtype, None)
    for page_shape, dtype in [
        *(((256, 8, 2, head_dim), jnp.bfloat16) for head_dim in (64, 72, 96, 192, 576)),
        ((256, 8, 4, 64), jnp.int8),
        ((256, 8, 64), jnp.float32),
    ]
}
# Here XLA makes the pages the minor axis: no page is in one piece.
PAGES_MINOR = {"bfloat16 (16, 8, 2, 64)": Shape(2, (16, 8, 2, 64), jnp.bfloat16, None)}


def spec(shape: Shape) -> PartitionSpec:
    axes: list[str | None] = [None] * (1 + len(shape.page_shape))
    if shape.heads_axis is not None:
        axes[shape.heads_axis] = "model"
    return PartitionSpec(*axes)


def measure(compile_it: Callable[[], jax.stages.Compiled]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        compiled = compile_it()
    except jax.errors.JaxRuntimeError as error:
        return {"error": str(error).splitlines()[0][:200]}
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return {
        "seconds": round(seconds, 2),
        "temp": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "calls": len(re.findall(r'custom_call_target="tpu_custom_call"', compiled.as_text())),
    }


def ours(shape: Shape, mesh: Mesh) -> Iterator[tuple[str, Callable[[], jax.stages.Compiled]]]:
    sharding = NamedSharding(mesh, spec(shape))
    pool = jax.ShapeDtypeStruct((NUM_PAGES, *shape.page_shape), shape.dtype, sharding=sharding)
    pools = [pool] * shape.layers
    ids = jax.ShapeDtypeStruct((N,), jnp.int32)
    layer_bytes = N * int(np.prod(shape.page_shape)) * pool.dtype.itemsize
    groups = plan_groups(shape.layers, layer_bytes, BUFFER_BYTES)
    packed = [
        jax.ShapeDtypeStruct(
            (rows, N, *shape.page_shape), shape.dtype, sharding=sharded.packed_sharding(sharding, pool.ndim)
        )
        for rows in groups
    ]
    copies = backend.build("pallas", pool)
    gather = jax.jit(sharded.gather(copies, groups, sharding, pool.ndim))
    scatter = jax.jit(sharded.scatter(copies, sharding, pool.ndim), donate_argnums=0)
    yield "gather", lambda: gather.lower(pools, ids).compile()
    yield "scatter", lambda: scatter.lower(pools, packed, ids).compile()


def tpu_inference(shape: Shape, mesh: Mesh) -> Callable[[], jax.stages.Compiled]:
    from tpu_inference.distributed.kv_transfer import _async_copy_jit

    sharding, replicated = (NamedSharding(mesh, axes) for axes in (spec(shape), PartitionSpec()))
    offsets = jax.ShapeDtypeStruct((N,), jnp.int32, sharding=replicated)
    source, target = (
        jax.ShapeDtypeStruct((pages, *shape.page_shape), shape.dtype, sharding=sharding)
        for pages in (N, NUM_PAGES)
    )
    everywhere = ("src_offsets", "dest_offsets", "chunk_sizes", "num_chunks")
    return lambda: _async_copy_jit.lower(
        src_array=[source] * shape.layers,
        dest_array=[target] * shape.layers,
        src_offsets=offsets,
        dest_offsets=offsets,
        chunk_sizes=offsets,
        num_chunks=jax.ShapeDtypeStruct((1,), jnp.int32, sharding=replicated),
        mesh=mesh,
        src_sharding_spec=sharding.spec,
        dest_sharding_spec=sharding.spec,
        **{f"{name}_sharding_spec": PartitionSpec() for name in everywhere},
    ).compile()


def report(topology: str) -> None:
    devices = topologies.get_topology_desc(topology, "tpu").devices
    meshes = [Mesh(np.array(devices[:count]), ("model",)) for count in (1, len(devices))]
    for model, any_shape in (SHAPES | TOKENS_MINOR | PAGES_MINOR).items():
        for mesh in meshes if model in SHAPES else meshes[:1]:
            shape = any_shape.on(mesh.size)
            split = mesh.size if shape.heads_axis is not None else 1
            pool = NUM_PAGES * int(np.prod(shape.page_shape)) * np.dtype(shape.dtype).itemsize
            row = {
                "topology": topology,
                "model": model,
                "devices": mesh.size,
                "pools": shape.layers * pool // split,
                "in_table": model in SHAPES,
                "kernel": model not in PAGES_MINOR,
            }
            todo = dict(ours(shape, mesh))
            if mesh.size > 1:  # the slowest by far: once per model
                todo["multi_layer_copy"] = tpu_inference(shape, mesh)
            for name, compile_it in todo.items():
                print(json.dumps(row | {"function": name} | measure(compile_it)), flush=True)


def table() -> None:
    print("| TPU | model | devices | function | custom calls | temp MiB | pools MiB | code KiB | compile s |")
    print("|---|---|---:|---|---:|---:|---:|---:|---:|")
    for row in map(json.loads, sys.stdin):
        if not row["in_table"]:
            continue
        cells = [row["topology"], row["model"], row["devices"], row["function"]]
        if "error" in row:
            cells += [row["error"], "", row["pools"] >> 20, "", ""]
        else:
            cells += [row["calls"], row["temp"] >> 20, row["pools"] >> 20, row["code"] >> 10, row["seconds"]]
        print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    table() if sys.argv[1] == "table" else report(sys.argv[1])
