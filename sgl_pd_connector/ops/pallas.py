"""Gather and scatter as one Pallas TPU kernel: DMAs from HBM to HBM, nothing passes through the cores.

One `pallas_call` copies the pages of all layers of a chunk. The page ids are prefetched into scalar memory,
where the kernel finds runs of consecutive pages; a run is one DMA per layer. Runs overlap, a ring of
semaphores bounds how many are in flight. A scatter's pools are aliased in place: only the named pages move.

Dynamically sized DMAs over runs of pages are how tpu-inference's `multi_layer_copy` writes a pulled cache. It
starts and waits in two `pallas_call`s per layer, takes the runs from the host, and pads the whole pool when
the last dimension is under 128; here the pool is seen in its own memory order instead (`page_major_order`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Runs in flight, each one DMA per layer. A guess (no TPU to measure on): with few layers the latency of a DMA
# hides behind several others, with many the first run alone fills the queues.
_RING = 8


def page_major_order(pool: jax.ShapeDtypeStruct) -> tuple[int, ...] | None:
    """The axes of a pool from major to minor in device memory; None when a page is not one contiguous range.

    XLA orders axes so that little is lost to tile padding: `[64, 256, 8, 2, 64]` bf16 lies in a v5e's memory
    as `[64, 8, 2, 64, 256]`. Transposed to that order a pool is the row-major array that a Pallas kernel
    takes, at no cost; asked for in any other order, XLA copies the whole pool first.
    """
    compiled = jax.jit(lambda x: x).lower(pool).compile()
    order: tuple[int, ...] = compiled.input_formats[0][0].layout.major_to_minor
    # Page ids must index neither of the two axes that make up a tile.
    return order if order[0] == 0 and len(order) > 2 else None


def gather_pages(
    pools: Sequence[jax.Array],
    page_ids: jax.Array,
    groups: Sequence[int],
    order: Sequence[int],
    interpret: Any = False,
) -> list[jax.Array]:
    """As `xla.gather_pages`. `order` comes from `page_major_order`, `interpret` goes to `pallas_call`."""
    views = [pool.transpose(order) for pool in pools]
    n, layers = page_ids.shape[0], len(pools)

    def kernel(ids: Any, *refs: Any) -> None:
        _copy_runs(ids, refs[:layers], refs[layers:-2], *refs[-2:], into_pools=False)

    shapes = [jax.ShapeDtypeStruct((rows, n, *views[0].shape[1:]), views[0].dtype) for rows in groups]
    packed = _call(kernel, [page_ids, *views], shapes, {}, interpret)
    return [buffer.transpose(np.argsort(_packed_order(order))) for buffer in packed]


def scatter_pages(
    pools: Sequence[jax.Array],
    packed: Sequence[jax.Array],
    page_ids: jax.Array,
    order: Sequence[int],
    interpret: Any = False,
) -> list[jax.Array]:
    """As `xla.scatter_pages`. `order` comes from `page_major_order`, `interpret` goes to `pallas_call`."""
    views = [pool.transpose(order) for pool in pools]
    sources = [buffer.transpose(_packed_order(order)) for buffer in packed]
    buffers = len(packed)

    def kernel(ids: Any, *refs: Any) -> None:
        _copy_runs(ids, refs[buffers + len(pools) : -2], refs[:buffers], *refs[-2:], into_pools=True)

    shapes = [jax.ShapeDtypeStruct(view.shape, view.dtype) for view in views]
    aliases = {1 + buffers + layer: layer for layer in range(len(pools))}  # operand 0 is the page ids
    written = _call(kernel, [page_ids, *sources, *views], shapes, aliases, interpret)
    return [view.transpose(np.argsort(order)) for view in written]


def _packed_order(order: Sequence[int]) -> tuple[int, ...]:
    return (0, 1, *(axis + 1 for axis in order[1:]))


def _call(
    kernel: Any,
    operands: Sequence[jax.Array],
    shapes: Sequence[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
    interpret: Any,
) -> list[jax.Array]:
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    outputs: list[jax.Array] = pl.pallas_call(
        kernel,
        out_shape=list(shapes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[in_hbm] * (len(operands) - 1),
            out_specs=[in_hbm] * len(shapes),
            scratch_shapes=[pltpu.SMEM(operands[0].shape, jnp.int32), pltpu.SemaphoreType.DMA((_RING,))],
        ),
        input_output_aliases=aliases,
        interpret=interpret,
    )(*operands)
    return outputs


def _copy_runs(
    ids: Any, pools: Sequence[Any], packed: Sequence[Any], lengths: Any, done: Any, *, into_pools: bool
) -> None:
    """The kernel. In SMEM: ids `[n]`, lengths `[n]` (of runs); in HBM: pools, packed; done: the ring."""
    n, num_pages = ids.shape[0], pools[0].shape[0]
    rows = [buffer.at[row] for buffer in packed for row in range(buffer.shape[0])]

    def copies(run: Any, first: Any, page: Any, length: Any) -> list[Any]:
        made = []
        for row, pool in zip(rows, pools, strict=True):
            source, target = row.at[pl.ds(first, length)], pool.at[pl.ds(page, length)]
            if not into_pools:
                source, target = target, source
            made.append(pltpu.make_async_copy(source, target, done.at[lax.rem(run, _RING)]))
        return made

    def wait(run: Any) -> None:
        @pl.when(lengths[run] > 0)
        def _() -> None:
            for copy in copies(run, 0, 0, lengths[run]):  # a wait only looks at the size
                copy.wait()

    def run_length(first: Any) -> Any:
        def continues(length: Any) -> Any:
            following = ids[jnp.minimum(first + length, n - 1)]
            return (first + length < n) & (following == ids[first] + length)

        return lax.while_loop(continues, lambda length: length + 1, jnp.int32(1))

    def start(state: tuple[Any, Any]) -> tuple[Any, Any]:
        first, run = state
        page, length = ids[first], run_length(first)
        here = page < num_pages
        pl.when(run >= _RING)(lambda: wait(run - _RING))
        lengths[run] = jnp.where(here, length, 0)

        @pl.when(here)
        def _() -> None:
            for copy in copies(run, first, page, length):
                copy.start()

        return first + length, run + 1

    _, runs = lax.while_loop(lambda state: state[0] < n, start, (jnp.int32(0), jnp.int32(0)))
    lax.fori_loop(jnp.maximum(runs - _RING, 0), runs, lambda run, _: wait(run), None)
