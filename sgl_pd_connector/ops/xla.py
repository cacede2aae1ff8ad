"""Gather and scatter as plain XLA: the version for CPU and GPU.

Both take the pools of one device, `[num_pages, *page_shape]`, and `[n]` int32 page ids. An id of `num_pages`
or more is another shard's page: a gather leaves its place undefined, a scatter skips it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def gather_pages(pools: Sequence[jax.Array], page_ids: jax.Array, groups: Sequence[int]) -> list[jax.Array]:
    """One packed buffer `[layers, n, *page_shape]` per group of consecutive layers."""
    packed: list[jax.Array] = []
    first = 0
    for layers in groups:
        taken = [pool.at[page_ids].get(mode="clip") for pool in pools[first : first + layers]]
        packed.append(jnp.stack(taken))
        first += layers
    return packed


def scatter_pages(
    pools: Sequence[jax.Array], packed: Sequence[jax.Array], page_ids: jax.Array
) -> list[jax.Array]:
    """The pools with the packed pages in place, updated in place by XLA when the pools are donated.

    A loop of `dynamic_update_slice` is one memcpy per page on CPU; the scatter op writes element by element.
    """
    mine = page_ids < pools[0].shape[0]
    rows = jnp.nonzero(mine, size=page_ids.shape[0])[0]
    sources = [(buffer, layer) for buffer in packed for layer in range(buffer.shape[0])]
    return [
        _put(pool, source, page_ids, rows, mine.sum()) for pool, source in zip(pools, sources, strict=True)
    ]


def _put(
    pool: jax.Array, source: tuple[jax.Array, int], page_ids: jax.Array, rows: jax.Array, count: jax.Array
) -> jax.Array:
    buffer, layer = source
    origin = (0,) * (pool.ndim - 1)

    def put_page(i: jax.Array, pool: jax.Array) -> jax.Array:
        page = lax.dynamic_slice(buffer, (layer, rows[i], *origin), (1, 1, *pool.shape[1:]))[0]
        return lax.dynamic_update_slice(pool, page, (page_ids[rows[i]], *origin))

    written: jax.Array = lax.fori_loop(0, count, put_page, pool)
    return written
