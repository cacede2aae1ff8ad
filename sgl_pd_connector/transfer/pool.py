"""Access to an engine's paged pools.

The arrays are donated and replaced at every forward, so one thread owns them: the engine's. `PoolWriter` is how the
pull thread gets data in: it queues writes, the engine's thread carries them out in its steps. Nobody keeps a reference
to a pool array across a step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from sgl_pd_connector import ops
from sgl_pd_connector.base import MAIN_KV, KVArgs, PoolTransferSpec
from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.transfer.lifecycle import Lifecycle

logger = logging.getLogger(__name__)


class KVRunner(Protocol):
    """What a manager asks of an engine's runner. Called on the engine's thread only."""

    def get_pools(self) -> list[jax.Array]:
        """The arrays as they are now, one per layer, ``[num_pages, *page_shape]``."""

    def set_pools(self, pools: list[jax.Array]) -> None:
        """Replaces them, after a write that donated the old ones."""


def kv_args(pools: Sequence[jax.Array], page_size: int) -> KVArgs:
    """Describes an engine's pools.

    Args:
        pools: one array per layer, ``[num_pages, *page_shape]``, all of one shape, dtype and sharding.
        page_size: tokens per page.

    Raises:
        ConfigError: the pools differ from layer to layer (hybrid models), or pages are split over devices (data
            parallelism inside one engine): this version moves neither.
    """
    kinds = {(pool.shape[1:], str(pool.dtype), pool.sharding) for pool in pools}
    if len(kinds) != 1:
        raise ConfigError(
            f"the layers' KV caches differ (hybrid models are not supported yet): {sorted(map(str, kinds))}"
        )
    pool = pools[0]
    splits = (1,) * pool.ndim
    if isinstance(pool.sharding, NamedSharding):
        whole = pool.shape
        splits = tuple(a // b for a, b in zip(whole, pool.sharding.shard_shape(whole), strict=True))
    if splits[0] != 1:
        raise ConfigError(
            f"pages are split over {splits[0]} devices: data parallelism inside one engine is not supported yet"
        )
    spec = PoolTransferSpec(
        name=MAIN_KV,
        pool_type="paged_kv",
        dtype=str(pool.dtype),
        shape=tuple(pool.shape[1:]),
        sharding=splits[1:],
        metadata={"num_layers": len(pools)},
    )
    return KVArgs(pools=[spec], page_size=page_size)


@dataclass(eq=False)
class PoolWrite:
    """One chunk on its way into the pool.

    Attributes:
        life: of the transfer; a write of a transfer that is over is not carried out.
        packed: the chunk's buffers, ready.
        page_ids: int32 ``[n]``, where each page goes.
        skip: leading pages of the buffers that are not written.
        token: becomes ready when the write is done; None until the engine dispatched it.
        error: why it could not be dispatched.
    """

    life: Lifecycle
    packed: Sequence[jax.Array]
    page_ids: np.ndarray
    skip: int
    token: jax.Array | None = None
    error: Exception | None = None


class PoolWriter:
    """Writes queued by the pull thread, carried out by the engine's. A deque's append and popleft are atomic."""

    def __init__(self) -> None:
        self._queue: deque[PoolWrite] = deque()

    def put(self, write: PoolWrite) -> None:
        """Any thread."""
        self._queue.append(write)

    def run(self, runner: KVRunner) -> None:
        """Engine's thread: dispatches every queued write. Does not wait for the device.

        An aborted transfer's pages may already belong to another request; both the abort and this happen on the
        engine's thread, so looking at `life` here is enough.
        """
        while self._queue:
            write = self._queue.popleft()
            if write.life.is_final:
                continue
            try:
                pools, token = ops.scatter(runner.get_pools(), write.packed, write.page_ids, skip=write.skip)
                runner.set_pools(pools)
            except Exception as error:
                logger.exception("cannot write %d pages into the pool", len(write.page_ids))
                write.error = error
            else:
                write.token = token
