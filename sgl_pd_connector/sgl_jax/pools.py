"""The scheduler's KV pool, as the manager and the queues need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sgl_pd_connector.base import BaseKVSender
from sgl_pd_connector.errors import ConfigError
from sgl_pd_connector.sgl_jax.surface import SchedulerSurface


class SchedulerPools:
    """The `KVRunner` of a scheduler. The cache itself knows nothing of it."""

    def __init__(self, scheduler: SchedulerSurface) -> None:
        """
        Raises:
            ConfigError: the model's cache is not one paged pool per layer.
        """
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        if type(pool).__name__ != "MHATokenToKVPool":
            raise ConfigError(
                f"the model's KV cache is a {type(pool).__name__}: only MHATokenToKVPool is supported (MLA, sliding "
                "windows and recurrent states are not transferred yet)"
            )
        if scheduler.model_config.is_multimodal:
            raise ConfigError(
                "multimodal models are not supported yet: images are not part of a prompt's digest"
            )
        self._scheduler = scheduler
        self._pool = pool

    def get_pools(self) -> list[jax.Array]:
        """The arrays as they are after the last forward that was launched.

        With the overlap schedule that forward is launched by another thread, which donates the arrays and puts the new
        ones in their place; until it has done so there is nothing to read. The wait is for the launch, not the result.
        """
        batch = self._scheduler.cur_batch
        if batch is not None and batch.launch_done is not None:
            batch.launch_done.wait()
        return list(self._pool.kv_buffer)

    def set_pools(self, pools: list[jax.Array]) -> None:
        self._pool.kv_buffer[:] = pools


class PageGuard:
    """Keeps pages from being reused while P's copy of them waits for room.

    sgl-jax frees a request's pages when it has finished, or hands them to the radix cache, which frees them when it
    pleases. Whoever frees them goes through the allocator, so that is where they are kept.
    """

    def __init__(self, allocator: Any) -> None:
        self._free = allocator.free
        self._page_size = allocator.page_size
        self._guarded: list[tuple[BaseKVSender, np.ndarray]] = []
        self._kept = np.empty(0, np.int32)
        allocator.free = self.free

    def __len__(self) -> int:
        return len(self._guarded)

    def keep(self, sender: BaseKVSender, page_ids: np.ndarray) -> None:
        """Until the sender has released them."""
        self._guarded.append((sender, page_ids))

    def sweep(self) -> None:
        """Gives back what was freed meanwhile and is guarded no longer."""
        if not self._guarded:
            return
        self._guarded = [(sender, pages) for sender, pages in self._guarded if not sender.released]
        kept, self._kept = self._kept, np.empty(0, np.int32)
        if len(kept):
            self.free(kept)

    def free(self, free_index: np.ndarray, dp_rank: int = 0) -> None:
        """Stands in for the allocator's own."""
        if self._guarded:
            guarded = np.concatenate([pages for _, pages in self._guarded])
            keep = np.isin(free_index // self._page_size, guarded)
            self._kept = np.concatenate((self._kept, free_index[keep]))
            free_index = free_index[~keep]
        self._free(free_index, dp_rank)


@dataclass
class Reservation:
    """Where D puts a prompt: what its radix cache holds already, and pages for the rest.

    Attributes:
        cached: token locations that belong to the cache, whole pages, in order.
        node: the node of the radix tree they end in, locked; None without a radix cache.
        own: token locations of the pages allocated for the rest.
    """

    cached: np.ndarray
    node: Any
    own: np.ndarray

    def locations(self, num_tokens: int) -> np.ndarray:
        """int32 ``[num_tokens]``: one location per token."""
        return np.concatenate((self.cached, self.own))[:num_tokens]


class DecodePages:
    """D's side of the allocator and the prefix cache."""

    def __init__(self, scheduler: SchedulerSurface) -> None:
        self._cache = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page_size = scheduler.page_size

    def reserve(self, req: Any, num_tokens: int, spare: int) -> Reservation | None:
        """Pages for the first ``num_tokens`` tokens of a request, or None if there is no room now.

        Args:
            req: the request.
            num_tokens: tokens to be received.
            spare: tokens that must stay free beside it, so that the request can run afterwards.
        """
        from sgl_jax.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sgl_jax.srt.mem_cache.common import evict_from_tree_cache
        from sgl_jax.srt.mem_cache.radix_cache import build_radix_key

        match = self._cache.match_prefix(MatchPrefixParams(key=build_radix_key(req, num_tokens), req=req))
        cached = match.device_indices.astype(np.int32)
        node = match.last_device_node
        self._cache.inc_lock_ref(node)
        size = -(-(num_tokens - len(cached)) // self._page_size) * self._page_size
        if size + spare <= self._allocator.available_size() + self._cache.evictable_size():
            evict_from_tree_cache(self._cache, size)
            own = self._allocator.alloc(size)
            if own is not None:
                return Reservation(cached, node, own.astype(np.int32))
        self._cache.dec_lock_ref(node)
        return None

    def unlock(self, reservation: Reservation) -> None:
        """The request runs: its batch has locked the cached part itself, and owns the rest."""
        self._cache.dec_lock_ref(reservation.node)

    def give_back(self, reservation: Reservation) -> None:
        """The request does without."""
        self.unlock(reservation)
        self._allocator.free(reservation.own)

    def page_ids(self, reservation: Reservation) -> Sequence[int]:
        """The pages to be received, in order."""
        return [int(location) // self._page_size for location in reservation.own[:: self._page_size]]

    def cached_pages(self, reservation: Reservation) -> int:
        """Leading pages that need not be received."""
        return len(reservation.cached) // self._page_size
