"""Gather and scatter over a mesh: each device copies its own shard's part of the pages."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from sgl_pd_connector.ops.backend import Backend

# The id of a page that is not copied here, another shard's or a skipped one: beyond every pool, and never the
# next of a run of pages.
ELSEWHERE = np.int32(np.iinfo(np.int32).max)


def packed_sharding(sharding: Sharding, ndim: int) -> Sharding:
    """The sharding of a packed buffer `[layers, n, *page_shape]` for pools of ndim axes sharded like this."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = _packed_spec(sharding.spec, ndim)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def gather(backend: Backend, groups: Sequence[int], sharding: Sharding, ndim: int) -> Callable[..., Any]:
    """The function (pools, page ids) -> packed buffers, to be compiled."""
    axes = _page_axes(sharding)

    def local(pools: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
        ids = _local_ids(ids, axes, pools[0].shape[0])
        packed = backend.gather(pools, ids, groups)
        return [_from_owner(buffer, ids, axes) for buffer in packed] if axes else packed

    if not isinstance(sharding, NamedSharding):
        return local
    pool, packed = sharding.spec, _packed_spec(sharding.spec, ndim)
    return _over_mesh(local, sharding, (pool, PartitionSpec()), packed)


def scatter(backend: Backend, sharding: Sharding, ndim: int) -> Callable[..., Any]:
    """The function (pools, packed buffers, page ids) -> (pools, token), to be compiled."""
    axes = _page_axes(sharding)

    def local(
        pools: list[jax.Array], packed: list[jax.Array], ids: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        written = backend.scatter(pools, packed, _local_ids(ids, axes, pools[0].shape[0]))
        # The barrier makes the token depend on every pool: no compiler may hand it out before the writes.
        *written, token = lax.optimization_barrier((*written, jnp.int32(0)))
        return list(written), token

    if not isinstance(sharding, NamedSharding):
        return local
    pool, packed = sharding.spec, _packed_spec(sharding.spec, ndim)
    return _over_mesh(local, sharding, (pool, packed, PartitionSpec()), (pool, PartitionSpec()))


def _over_mesh(
    local: Callable[..., Any], sharding: NamedSharding, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    # check_vma: a Pallas call says nothing about which axes its outputs vary over.
    return jax.shard_map(local, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _packed_spec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    axes = [*spec, *[None] * (ndim - len(spec))]
    return PartitionSpec(None, None, *axes[1:])


def _page_axes(sharding: Sharding) -> tuple[str, ...]:
    """The mesh axes of more than one device that split the pages themselves (data parallelism)."""
    if isinstance(sharding, SingleDeviceSharding):
        return ()
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"pools must have a NamedSharding or a SingleDeviceSharding, not {sharding}")
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in names if sharding.mesh.shape[name] > 1)


def _local_ids(ids: jax.Array, axes: tuple[str, ...], local_pages: int) -> jax.Array:
    if not axes:
        return ids
    local = ids - lax.axis_index(axes) * local_pages
    return jnp.where((local >= 0) & (local < local_pages), local, ELSEWHERE)


def _from_owner(buffer: jax.Array, ids: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Every shard gets each page from its owner: a sum of integers to which all others add zero."""
    bits = lax.bitcast_convert_type(buffer, jnp.dtype(f"uint{8 * buffer.dtype.itemsize}"))
    owned = (ids != ELSEWHERE).reshape(1, -1, *[1] * (buffer.ndim - 2))
    return lax.bitcast_convert_type(lax.psum(jnp.where(owned, bits, 0), axes), buffer.dtype)
