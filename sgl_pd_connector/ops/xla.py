"""Gather and scatter as plain XLA: the version for CPU and GPU.

Both take the pools of one device, `[num_pages, *page_shape]`, and `[n]` int32 page ids. An id of `num_pages`
or more is another shard's page: a gather leaves its place undefined, a scatter skips it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FUSED_LAYERS = 8
"""Up to so many layers XLA's CPU compiler makes one loop of gathering and concatenating, which writes a buffer once and
with all threads. Of more it gathers each into memory of its own and copies that."""


def compiler_options(platform: str, dtype: np.dtype[Any]) -> dict[str, str] | None:
    """Options to compile these functions with; None for XLA's own.

    XLA's CPU compiler computes small floats in float32 wherever its version does not know that an op can take them:
    one page written into a bfloat16 (jaxlib 0.10) or float8 (all) pool converts the whole pool there and back. Nothing
    is computed here, so that pass is turned off. Bits are then moved as they are, the payloads of NaNs included.
    """
    if platform != "cpu":
        return None
    # "bfloat16" is "bf16" to XLA, "float8_e4m3fn" is "f8e4m3fn"; names that are no pass are ignored.
    name = dtype.name.replace("float", "f").replace("_", "")
    return {"xla_disable_hlo_passes": f"float-normalization-{name}"}


def gather_pages(pools: Sequence[jax.Array], page_ids: jax.Array, groups: Sequence[int]) -> list[jax.Array]:
    """One packed buffer `[layers, n, *page_shape]` per group of consecutive layers."""
    packed: list[jax.Array] = []
    first = 0
    for layers in groups:
        taken = [pool.at[page_ids].get(mode="clip")[None] for pool in pools[first : first + layers]]
        packed.append(jnp.concatenate(taken) if layers <= FUSED_LAYERS else _in_rows(taken))
        first += layers
    return packed


def _in_rows(taken: Sequence[jax.Array]) -> jax.Array:
    """Each layer gathered straight into its row. What is empty is zeroed first on a CPU."""
    buffer: jax.Array = lax.empty((len(taken), *taken[0].shape[1:]), taken[0].dtype)
    for row, layer in enumerate(taken):
        buffer = lax.dynamic_update_slice(buffer, layer, (row, *[0] * (buffer.ndim - 1)))
    return buffer


def scatter_pages(
    pools: Sequence[jax.Array], packed: Sequence[jax.Array], page_ids: jax.Array
) -> list[jax.Array]:
    """The pools with the packed pages in place, updated in place by XLA when the pools are donated.

    A loop of `dynamic_update_slice` is one memcpy per page on CPU; the scatter op writes element by element.
    """
    here = page_ids < pools[0].shape[0]
    rows = jnp.nonzero(here, size=page_ids.shape[0])[0]
    sources = [(buffer, layer) for buffer in packed for layer in range(buffer.shape[0])]
    origin = (0,) * (pools[0].ndim - 1)

    def put_page(i: jax.Array, pools: list[jax.Array]) -> list[jax.Array]:
        row = rows[i]
        pages = [lax.dynamic_slice(b, (at, row, *origin), (1, 1, *b.shape[2:]))[0] for b, at in sources]
        return [
            lax.dynamic_update_slice(pool, page, (page_ids[row], *origin))
            for pool, page in zip(pools, pages, strict=True)
        ]

    written: list[jax.Array] = lax.fori_loop(0, here.sum(), put_page, list(pools))
    return written
