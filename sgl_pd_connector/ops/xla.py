"""Gather and scatter as plain XLA: the version for CPU and GPU.

Both take the local shards of the pools, `[pages, *page_shape]`, and local page ids, `[n]` int32. With
`partial` an id may be `pages`, one past the last: that page is another shard's, a gather leaves zeros in its
place and a scatter writes nothing.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def gather_pages(
    pools: Sequence[jax.Array], page_ids: jax.Array, groups: Sequence[int], *, partial: bool
) -> list[jax.Array]:
    """One packed buffer `[layers, n, *page_shape]` per group of consecutive layers."""
    packed: list[jax.Array] = []
    first = 0
    for layers in groups:
        taken = [_take(pool, page_ids, partial) for pool in pools[first : first + layers]]
        packed.append(jnp.stack(taken))
        first += layers
    return packed


def scatter_pages(
    pools: Sequence[jax.Array],
    packed: Sequence[jax.Array],
    page_ids: jax.Array,
    skip: jax.Array,
    *,
    partial: bool,
) -> list[jax.Array]:
    """The pools with the packed pages in place, updated in place by XLA when the pools are donated.

    A loop of `dynamic_update_slice` is one memcpy per page on CPU; the scatter op writes element by element.
    """
    written: list[jax.Array] = []
    for buffer in packed:
        for layer in range(buffer.shape[0]):
            written.append(_put(pools[len(written)], buffer, layer, page_ids, skip, partial))
    return written


def _take(pool: jax.Array, page_ids: jax.Array, partial: bool) -> jax.Array:
    taken: jax.Array = pool.at[page_ids].get(mode="fill" if partial else "promise_in_bounds", fill_value=0)
    return taken


def _put(  # noqa: PLR0917
    pool: jax.Array, buffer: jax.Array, layer: int, page_ids: jax.Array, skip: jax.Array, partial: bool
) -> jax.Array:
    origin = (0,) * (pool.ndim - 1)

    def put_page(i: jax.Array, pool: jax.Array) -> jax.Array:
        page = lax.dynamic_slice(buffer, (layer, i, *origin), (1, 1, *pool.shape[1:]))[0]
        target = page_ids[i]
        if partial:
            own = target < pool.shape[0]
            target = jnp.minimum(target, pool.shape[0] - 1)
            page = jnp.where(own, page, lax.dynamic_slice(pool, (target, *origin), page.shape))
        return lax.dynamic_update_slice(pool, page, (target, *origin))

    written: jax.Array = lax.fori_loop(skip, buffer.shape[1], put_page, pool)
    return written
