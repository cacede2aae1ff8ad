"""Compiled gather and scatter: one executable per (pools, page count, groups), kept for good."""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from sgl_pd_connector.ops import xla


class PoolLike(Protocol):
    """What is asked of a pool: a `jax.Array`, or a `jax.ShapeDtypeStruct` with a sharding."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def sharding(self) -> Any: ...


_BACKENDS = ("xla", "pallas", "pallas_interpret")
_forced: str | None = None
_lock = threading.Lock()  # guards _compiled; two threads asking for one shape compile it once
_compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}


def set_backend(name: str | None) -> None:
    """Forces "xla", "pallas" or "pallas_interpret" for this process; None goes back to the platform's own."""
    global _forced  # noqa: PLW0603
    if name is not None and name not in _BACKENDS:
        raise ValueError(f"ops backend {name!r} is unknown: choose one of {', '.join(_BACKENDS)}")
    _forced = name


def backend(platform: str) -> str:
    """The backend on a platform: forced, else SGL_PD_OPS_BACKEND, else Pallas on "tpu" and XLA elsewhere."""
    name = _forced or os.environ.get("SGL_PD_OPS_BACKEND") or ("pallas" if platform == "tpu" else "xla")
    if name not in _BACKENDS:
        raise ValueError(f"SGL_PD_OPS_BACKEND={name!r} is unknown: choose one of {', '.join(_BACKENDS)}")
    return name


def compilations() -> int:
    """Executables compiled so far in this process. Constant once `warmup` has run."""
    return len(_compiled)


def gather(pools: Sequence[jax.Array], page_ids: np.ndarray, groups: Sequence[int]) -> tuple[jax.Array, ...]:
    """Copies pages out of the paged pools into packed buffers, in one asynchronous dispatch.

    pools: one array per layer, `[num_pages, *page_shape]`, equal in shape, dtype and sharding; not donated.
    page_ids: `[n]` int32 on the host, any order.
    groups: how many consecutive layers go into each buffer; the sum is `len(pools)`.

    Returns one array per group, `[layers_in_group, n, *page_shape]`, sharded like the pools on the axes of
    page_shape and replicated over the mesh axes that split the pages.
    Raises ValueError for page ids outside the pool and for groups that do not add up.
    """
    ids = _check_ids(page_ids, pools[0].shape[0])
    run = _executable("gather", pools, len(ids), tuple(groups))
    packed: tuple[jax.Array, ...] = run(list(pools), ids)
    return packed


def scatter(
    pools: Sequence[jax.Array], packed: Sequence[jax.Array], page_ids: np.ndarray, skip: int = 0
) -> tuple[list[jax.Array], jax.Array]:
    """Writes packed buffers, as `gather` returned them, into the named pages, in one asynchronous dispatch.

    pools: as for `gather`; donated, their memory is updated in place and the arrays passed in are dead after.
    packed: one `[layers_in_group, n, *page_shape]` per group, in layer order, sharded as `packed_specs` says.
    page_ids: `[n]` int32 on the host, distinct from `skip` on, any order.
    skip: how many leading pages of the buffers are not written; their ids do not matter.

    Returns the new pools and a token: an int32 scalar that becomes ready when, and only when, the
    writes are done. Whoever waits for it holds no reference to the pools, so the engine may donate them.
    Raises ValueError, before anything is donated, for page ids outside the pool or named twice and for
    buffers that do not fit the pools.
    """
    if not 0 <= skip < len(page_ids):
        raise ValueError(f"scatter: cannot skip {skip} of {len(page_ids)} pages")
    ids = _check_ids(page_ids, pools[0].shape[0])
    if len(np.unique(ids[skip:])) != len(ids) - skip:
        raise ValueError(f"scatter: a page is named twice in {ids.tolist()}")
    groups = tuple(buffer.shape[0] for buffer in packed)
    for buffer, spec in zip(packed, packed_specs(pools, len(ids), groups), strict=True):
        if buffer.shape != spec.shape or buffer.dtype != spec.dtype:
            raise ValueError(
                f"scatter: a packed buffer is {buffer.dtype}{list(buffer.shape)}, "
                f"the pools ask for {spec.dtype}{list(spec.shape)}"
            )
    new_pools, token = _executable("scatter", pools, len(ids), groups)(
        list(pools), list(packed), ids, np.int32(skip)
    )
    return new_pools, token


def packed_specs(
    pools: Sequence[PoolLike], n: int, groups: Sequence[int]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape, dtype and sharding of the buffers that `gather` makes of n pages: what a decode server pulls."""
    if sum(groups) != len(pools):
        raise ValueError(f"groups {tuple(groups)} name {sum(groups)} layers, there are {len(pools)} pools")
    pool = pools[0]
    sharding: Sharding = pool.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(
            sharding.mesh, _packed_pspec(sharding.spec, len(pool.shape)), memory_kind=sharding.memory_kind
        )
    return tuple(
        jax.ShapeDtypeStruct((layers, n, *pool.shape[1:]), pool.dtype, sharding=sharding) for layers in groups
    )


def warmup(
    pools: Sequence[PoolLike],
    groups_by_n: Mapping[int, Sequence[int]],
    ops: Sequence[str] = ("gather", "scatter"),
) -> None:
    """Compiles gather and scatter for every page count of the ladder, without running or touching the pools.

    groups_by_n: page count -> groups, as the chunk plan fixes them. Call before the server says it is ready.
    """
    for n, groups in groups_by_n.items():
        for op in ops:
            _executable(op, pools, n, tuple(groups))


def _check_ids(page_ids: np.ndarray, num_pages: int) -> np.ndarray:
    ids = np.asarray(page_ids, dtype=np.int32)
    if ids.ndim != 1 or ids.size == 0:
        raise ValueError(f"page ids must be a list of at least one page, not of shape {ids.shape}")
    if ids.min() < 0 or ids.max() >= num_pages:
        raise ValueError(f"page ids {ids.min()}..{ids.max()} lie outside the pool of {num_pages} pages")
    return ids


def _packed_pspec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    axes = [*spec, *[None] * (ndim - len(spec))]
    return PartitionSpec(None, None, *axes[1:])


def _executable(op: str, pools: Sequence[PoolLike], n: int, groups: tuple[int, ...]) -> jax.stages.Compiled:
    pool = pools[0]
    device = next(iter(pool.sharding.device_set))
    key = (op, backend(device.platform), len(pools), pool.shape, pool.dtype, pool.sharding, n, groups)
    with _lock:
        if key not in _compiled:
            _compiled[key] = _compile(op, pools, n, groups)
        return _compiled[key]


def _compile(op: str, pools: Sequence[PoolLike], n: int, groups: tuple[int, ...]) -> jax.stages.Compiled:
    pool_specs = [jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding) for p in pools]
    if len(set(pool_specs)) != 1:
        raise ValueError(f"the pools differ from one another: {set(pool_specs)}")
    packed = packed_specs(pools, n, groups)
    ids = jax.ShapeDtypeStruct((n,), jnp.int32)
    sharding: Sharding = pools[0].sharding
    if op == "gather":
        return jax.jit(_gather(sharding, groups, pool_specs[0].ndim)).lower(pool_specs, ids).compile()
    fn = jax.jit(_scatter(sharding, pool_specs[0].ndim), donate_argnums=0)
    return fn.lower(pool_specs, list(packed), ids, jax.ShapeDtypeStruct((), jnp.int32)).compile()


def _gather(sharding: Sharding, groups: tuple[int, ...], ndim: int) -> Callable[..., Any]:
    axes = _page_axes(sharding)

    def local(pools: list[jax.Array], ids: jax.Array) -> tuple[jax.Array, ...]:
        ids = _local_ids(ids, axes, pools[0].shape[0])
        packed = xla.gather_pages(pools, ids, groups, partial=bool(axes))
        return tuple(_sum_bits(buffer, axes) if axes else buffer for buffer in packed)

    if not isinstance(sharding, NamedSharding):
        return local
    return jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, PartitionSpec()),
        out_specs=_packed_pspec(sharding.spec, ndim),
        check_vma=False,
    )


def _scatter(sharding: Sharding, ndim: int) -> Callable[..., Any]:
    axes = _page_axes(sharding)

    def local(
        pools: list[jax.Array], packed: list[jax.Array], ids: jax.Array, skip: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        ids = _local_ids(ids, axes, pools[0].shape[0])
        new_pools = xla.scatter_pages(pools, packed, ids, skip, partial=bool(axes))
        # The barrier makes the token depend on every pool: no compiler may hand it out before the writes.
        *new_pools, token = lax.optimization_barrier((*new_pools, jnp.int32(0)))
        return list(new_pools), token

    if not isinstance(sharding, NamedSharding):
        return local
    return jax.shard_map(
        local,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, _packed_pspec(sharding.spec, ndim), PartitionSpec(), PartitionSpec()),
        out_specs=(sharding.spec, PartitionSpec()),
        check_vma=False,
    )


def _page_axes(sharding: Sharding) -> tuple[str, ...]:
    """The mesh axes of more than one device that split the pages themselves (data parallelism)."""
    if isinstance(sharding, SingleDeviceSharding):
        return ()
    if not isinstance(sharding, NamedSharding):
        raise ValueError(f"pools must have a NamedSharding or a SingleDeviceSharding, not {sharding}")
    axes = sharding.spec[0] if len(sharding.spec) else None
    names: Iterable[str] = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return tuple(name for name in names if sharding.mesh.shape[name] > 1)


def _local_ids(ids: jax.Array, axes: tuple[str, ...], local_pages: int) -> jax.Array:
    """Page ids within this shard; `local_pages`, one past the last, stands for a page of another shard."""
    if not axes:
        return ids
    local = ids - lax.axis_index(axes) * local_pages
    return jnp.where((local >= 0) & (local < local_pages), local, local_pages)


def _sum_bits(buffer: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Each page comes from the one shard that owns it, zeros from the others; as integers, to keep bits."""
    bits = lax.bitcast_convert_type(buffer, jnp.dtype(f"uint{8 * buffer.dtype.itemsize}"))
    return lax.bitcast_convert_type(lax.psum(bits, axes), buffer.dtype)
