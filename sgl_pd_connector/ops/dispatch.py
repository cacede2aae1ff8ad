"""Compiled gather and scatter: one executable per (pools, page count, groups), kept for good."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sgl_pd_connector.ops import backend, sharded


class PoolLike(Protocol):
    """What is asked of a pool: a `jax.Array`, or a `jax.ShapeDtypeStruct` with a sharding."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def sharding(self) -> Any: ...


_lock = threading.Lock()  # guards _compiled; two threads asking for one shape compile it once
_compiled: dict[tuple[Any, ...], jax.stages.Compiled] = {}


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
    return tuple(run(list(pools), ids))


def scatter(
    pools: Sequence[jax.Array], packed: Sequence[jax.Array], page_ids: np.ndarray, skip: int = 0
) -> tuple[list[jax.Array], jax.Array]:
    """Writes packed buffers, as `gather` returned them, into the named pages, in one asynchronous dispatch.

    pools: as for `gather`; donated, their memory is updated in place and the arrays passed in are dead after.
    packed: one `[layers_in_group, n, *page_shape]` per group, in layer order, sharded as `packed_specs` says.
    page_ids: `[n]` int32 on the host, distinct, any order.
    skip: how many leading pages of the buffers are not written; their ids do not matter.

    Returns the new pools and a token: an int32 scalar that becomes ready when, and only when, the
    writes are done. Whoever waits for it holds no reference to the pools, so the engine may donate them.
    Raises ValueError, before anything is donated, for page ids outside the pool or named twice and for
    buffers that do not fit the pools.
    """
    if not 0 <= skip < len(page_ids):
        raise ValueError(f"scatter: cannot skip {skip} of {len(page_ids)} pages")
    written = _check_ids(page_ids[skip:], pools[0].shape[0])
    if len(np.unique(written)) != len(written):
        raise ValueError(f"scatter: a page is named twice in {written.tolist()}")
    ids = np.concatenate((np.full(skip, sharded.ELSEWHERE), written))
    groups = tuple(buffer.shape[0] for buffer in packed)
    for buffer, spec in zip(packed, packed_specs(pools, len(ids), groups), strict=True):
        if buffer.shape != spec.shape or buffer.dtype != spec.dtype:
            raise ValueError(
                f"scatter: a packed buffer is {buffer.dtype}{list(buffer.shape)}, "
                f"the pools ask for {spec.dtype}{list(spec.shape)}"
            )
    new_pools, token = _executable("scatter", pools, len(ids), groups)(list(pools), list(packed), ids)
    return new_pools, token


def packed_specs(
    pools: Sequence[PoolLike], n: int, groups: Sequence[int]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape, dtype and sharding of the buffers that `gather` makes of n pages: what a decode server pulls."""
    if sum(groups) != len(pools):
        raise ValueError(f"groups {tuple(groups)} name {sum(groups)} layers, there are {len(pools)} pools")
    pool = pools[0]
    sharding = sharded.packed_sharding(pool.sharding, len(pool.shape))
    return tuple(
        jax.ShapeDtypeStruct((layers, n, *pool.shape[1:]), pool.dtype, sharding=sharding) for layers in groups
    )


def warmup(
    pools: Sequence[PoolLike],
    groups_by_n: Mapping[int, Sequence[int]],
    ops: Sequence[str] = ("gather", "scatter"),
) -> None:
    """Compiles the ops for every page count of the ladder, without running them or touching the pools.

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


def _executable(op: str, pools: Sequence[PoolLike], n: int, groups: tuple[int, ...]) -> jax.stages.Compiled:
    pool = pools[0]
    device = next(iter(pool.sharding.device_set))
    name = backend.backend_name(device.platform)
    key = (op, name, len(pools), pool.shape, pool.dtype, pool.sharding, n, groups)
    with _lock:
        if key not in _compiled:
            _compiled[key] = _compile(op, name, pools, n, groups)
        return _compiled[key]


def _compile(
    op: str, name: str, pools: Sequence[PoolLike], n: int, groups: tuple[int, ...]
) -> jax.stages.Compiled:
    specs = [jax.ShapeDtypeStruct(pool.shape, pool.dtype, sharding=pool.sharding) for pool in pools]
    pool = specs[0]
    if any(spec != pool for spec in specs):
        raise ValueError(f"the pools differ from one another: {sorted(set(map(str, specs)))}")
    packed = list(packed_specs(pools, n, groups))
    ids = jax.ShapeDtypeStruct((n,), jnp.int32)
    copies = backend.build(name, pool)
    if op == "gather":
        lowered = jax.jit(sharded.gather(copies, groups, pool.sharding, pool.ndim)).lower(specs, ids)
    else:
        run = jax.jit(sharded.scatter(copies, pool.sharding, pool.ndim), donate_argnums=0)
        lowered = run.lower(specs, packed, ids)
    return lowered.compile(copies.compiler_options)
