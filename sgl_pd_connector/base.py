"""The protocol layer: the 4-tuple that every KV transfer backend implements.

One *manager* per engine process owns the pools and hands out a *sender* (prefill side) or a *receiver* (decode side)
per request; the *bootstrap server* is where the two sides find each other. The shape and the names follow sglang's
disaggregation interface (``sglang.srt.disaggregation.base``) and the RFC for sgl-jax; nothing here knows JAX, sockets
or an engine.

Life of one request::

                 sender (P)                             receiver (D)
    Bootstrapping     no D has asked for the room            P not found, or has not said READY
    WaitingForInput   D asked; prefill not finished          READY; waiting for pages to write into
    Transferring      packed copy offered to D               pulling and scattering
    Success           D said DONE                            every pool pulled, written and DONE sent
    Failed            failure_exception() says why           failure_exception() says why
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_pd_connector.errors import IllegalTransitionError, PDError

MAIN_KV = "main_kv"
"""Name of the pool that holds the attention KV cache. The only one this version moves."""


class KVPoll(enum.IntEnum):
    """Where one side of one transfer stands.

    ``Bootstrapping -> WaitingForInput -> Transferring -> Success``, one step at a time; ``Failed`` from any of the
    first three. ``Success`` and ``Failed`` are final.
    """

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4

    @property
    def is_final(self) -> bool:
        return self in (KVPoll.Success, KVPoll.Failed)

    def next(self, to: KVPoll) -> KVPoll:
        """Returns ``to`` if it may follow this state, else raises `IllegalTransitionError` naming both."""
        if not self.is_final and (to == self + 1 or to is KVPoll.Failed):
            return to
        raise IllegalTransitionError(f"{self.name} -> {to.name} is not a transition of KVPoll")


@dataclass(frozen=True)
class PoolTransferSpec:
    """One paged pool to be moved.

    Attributes:
        name: unique within a request; the attention cache is `MAIN_KV`.
        pool_type: what kind of memory it is: ``"paged_kv"``.
        dtype: element type by its NumPy/ml_dtypes name, e.g. ``"bfloat16"``.
        shape: shape of ONE page of ONE layer, e.g. ``(page, heads*2/p, p, head_dim)``.
        sharding: for each axis of ``shape`` the number of devices it is split over, e.g. ``(1, 4, 1, 1)``.
        metadata: what the backend needs beside that: ``num_layers``, ``page_size`` (tokens).
    """

    name: str
    pool_type: str
    dtype: str
    shape: tuple[int, ...]
    sharding: tuple[int, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KVArgs:
    """What an engine tells its manager about itself.

    Attributes:
        pools: the pools to be moved. A transfer is `KVPoll.Success` only when every pool is done. This version moves
            exactly ``[main_kv]`` and refuses other lists.
        page_size: tokens per page.
    """

    pools: Sequence[PoolTransferSpec]
    page_size: int


class BaseKVSender(ABC):
    """The prefill side of one request."""

    @abstractmethod
    def send(self, kv_indices: Sequence[int]) -> bool:
        """Offers the KV of a prompt to the decode side. Called once, on the engine's thread, without blocking.

        Args:
            kv_indices: the page ids of the whole prompt, in order, the partial last page included.

        Returns:
            True when the pages have been copied out (or the copy is queued on the device before any later use of
            them), so the engine may free them; False when the copy waits for room: keep the pages until `released`.
        """

    @property
    @abstractmethod
    def released(self) -> bool:
        """Whether the engine may reuse the pages given to `send` (also True once the sender has failed)."""

    @abstractmethod
    def poll(self) -> KVPoll:
        """The state, now. Never blocks."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Gives up: tells the decode side and drops what is held. Harmless when already final."""

    @abstractmethod
    def failure_exception(self) -> PDError:
        """Why the sender failed. Raises `RuntimeError` unless `poll` is `KVPoll.Failed`."""


class BaseKVReceiver(ABC):
    """The decode side of one request."""

    def __init__(self, mgr: BaseKVManager, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room

    @abstractmethod
    def receive(self, kv_indices: Sequence[int], skip_pages: int = 0) -> None:
        """Starts the pull. Called once, in `KVPoll.WaitingForInput`, on the engine's thread, without blocking.

        Args:
            kv_indices: ids of the pages to write, in prompt order, without the skipped ones.
            skip_pages: how many leading pages of the prompt this side already holds; they are not pulled.
        """

    @abstractmethod
    def poll(self) -> KVPoll:
        """The state, now. Never blocks."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Gives up: no page is written after this returns, and the prefill side is told. Harmless when final."""

    @abstractmethod
    def failure_exception(self) -> PDError:
        """Why the receiver failed. Raises `RuntimeError` unless `poll` is `KVPoll.Failed`."""


class BaseKVManager(ABC):
    """One per engine process: owns the access to the pools and every transfer of that process."""

    def __init__(self, args: KVArgs, bootstrap_addr: str) -> None:
        if [pool.name for pool in args.pools] != [MAIN_KV]:
            names = ", ".join(pool.name for pool in args.pools) or "none"
            raise NotImplementedError(
                f"this version moves exactly one pool named {MAIN_KV!r}; KVArgs.pools has: {names}"
            )
        self.args = args
        self.bootstrap_addr = bootstrap_addr

    @abstractmethod
    def register_runner(self, runner: Any) -> None:
        """Gives the manager its access to the paged pools. Called once, when the runner's cache exists."""

    @abstractmethod
    def create_sender(self, room: int) -> BaseKVSender:
        """A sender for ``room``. Rooms are 0 <= room < 2**63."""

    @abstractmethod
    def create_receiver(self, room: int) -> BaseKVReceiver:
        """A receiver for ``room`` from a prefill instance registered at this manager's own bootstrap address."""


class BaseKVBootstrapServer(ABC):
    """Where prefill and decode instances find each other."""

    @abstractmethod
    def start(self) -> None:
        """Serves, or raises `PDError` in the caller's thread."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the service and waits for it. Harmless when not started."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether it serves, now."""
