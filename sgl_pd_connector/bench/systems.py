"""Ways to bring pages from one process to another, behind one interface so that they can be timed in alternation.

A system is made once in P (``peer`` is None) and once in D (``peer`` is what P's `address` said). A round is `arm` on
D, `fire` on P, `land` on D.
"""

from __future__ import annotations

import socket
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.bench.shapes import HandoffCase
from sgl_pd_connector.config import load_config
from sgl_pd_connector.transfer import JaxTransferKVManager, kv_args
from sgl_pd_connector.transfer.engine import JaxLink, JaxTransferKVEngine
from sgl_pd_connector.transfer.transport import Peer

CHANNELS = 4
TRANSFER_SIZE = 16 << 20
WAIT_SECONDS = 120.0
POLL_SECONDS = 0.0001
MAX_CONCURRENT = 10_000


class Pools:
    """The pools of one process, as an engine's runner has them."""

    def __init__(self, case: HandoffCase) -> None:
        shape = case.shape
        num_pages = case.pages * case.concurrent + 1
        self._pools = [jnp.zeros((num_pages, *shape.page_shape), shape.dtype) for _ in range(shape.layers)]
        self.page_ids = [
            list(range(1 + index * case.pages, 1 + (index + 1) * case.pages))
            for index in range(case.concurrent)
        ]

    def get_pools(self) -> list[jax.Array]:
        return list(self._pools)

    def set_pools(self, pools: list[jax.Array]) -> None:
        self._pools = pools


class System(Protocol):
    """One way, one side of it."""

    def address(self) -> Any:
        """P: what D needs to reach it."""

    def arm(self, number: int) -> None:
        """D: gets ready to receive round ``number``, as far as possible before P offers."""

    def fire(self, number: int) -> None:
        """P: offers round ``number``."""

    def land(self) -> None:
        """D: returns when everything is where it belongs."""

    def close(self) -> None:
        """Gives everything back."""


class Ours:
    """gather -> register -> READY -> pull -> wait -> scatter -> DONE, through `JaxTransferKVManager`."""

    def __init__(self, case: HandoffCase, pools: Pools, peer: Any) -> None:
        self._case = case
        self._pools = pools
        self._peer = peer
        self._tokens = case.pages * case.shape.page_size
        self._receivers: list[Any] = []
        budget = max(1 << 30, 2 * case.nbytes)
        settings = {"bootstrap_port": 0, "max_packed_bytes": budget, "max_pulled_bytes": budget}
        self.manager = JaxTransferKVManager(
            kv_args(pools.get_pools(), case.shape.page_size),
            None,
            role="prefill" if peer is None else "decode",
            config=load_config(settings, where="bench", environ={}),
        )
        self.manager.register_runner(pools)

    def address(self) -> str:
        return self.manager.bootstrap_addr

    def arm(self, number: int) -> None:
        self._receivers = [
            self.manager.create_receiver(number * MAX_CONCURRENT + index, b"", self._tokens, self._peer)
            for index in range(self._case.concurrent)
        ]

    def fire(self, number: int) -> None:
        for index, page_ids in enumerate(self._pools.page_ids):
            self.manager.create_sender(number * MAX_CONCURRENT + index, b"", self._tokens).send(page_ids)

    def land(self) -> None:
        waiting = list(zip(self._receivers, self._pools.page_ids, strict=True))
        deadline = time.monotonic() + WAIT_SECONDS
        while waiting:
            self.manager.step()
            waiting = [each for each in waiting if not self._landed(*each)]
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(waiting)} transfers did not end in {WAIT_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def _landed(self, receiver: Any, page_ids: list[int]) -> bool:
        match receiver.poll():
            case KVPoll.Failed:
                raise receiver.failure_exception()
            case KVPoll.WaitingForInput:
                receiver.receive(page_ids)
                return False
            case state:
                return state is KVPoll.Success

    def close(self) -> None:
        self.manager.close()


class Raw:
    """One `jax.experimental.transfer` pull of the same bytes in one array, with its best settings."""

    def __init__(self, case: HandoffCase, pools: Pools, peer: Any) -> None:
        self._engine = JaxTransferKVEngine(
            host="127.0.0.1",
            port=0,
            channels=CHANNELS,
            transfer_size=TRANSFER_SIZE,
            serve=peer is None,
            stall_timeout=60.0,
        )
        self._link: JaxLink | None = None
        if peer is None:
            self._array = jnp.zeros((case.nbytes,), jnp.uint8)
        else:
            self._link = self._engine.link(Peer("bench", 1, peer))
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            self._spec = jax.ShapeDtypeStruct((case.nbytes,), jnp.uint8, sharding=sharding)

    def address(self) -> str:
        return self._engine.transfer_addr

    def arm(self, number: int) -> None:
        assert self._link is not None
        self._pulled = self._link.pull(number, [self._spec])

    def fire(self, number: int) -> None:
        self._engine.register(number, [self._array], WAIT_SECONDS)

    def land(self) -> None:
        (array,) = self._pulled
        array.block_until_ready()
        self._pulled = []

    def close(self) -> None:
        if self._link is not None:
            self._link.retire()
            self._link.cut()


class Tcp:
    """One TCP connection, warm buffers on both sides: the limit of the machine's loopback."""

    def __init__(self, case: HandoffCase, pools: Pools, peer: Any) -> None:
        self._buffer = np.ones(case.nbytes, np.uint8)
        self._connection: socket.socket | None = None
        if peer is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
        else:
            self._connection = socket.create_connection(("127.0.0.1", peer))

    def address(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def arm(self, number: int) -> None:
        pass

    def fire(self, number: int) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._listener.close()
        self._connection.sendall(self._buffer)

    def land(self) -> None:
        assert self._connection is not None
        view = memoryview(self._buffer)
        while view:
            view = view[self._connection.recv_into(view) :]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class TpuConnector:
    """The data path of tpu-inference's TPUConnector, by its own functions and with its own server settings.

    One gather compiled per page count, one `await_pull` of all layers, a pull that is polled each millisecond, an
    insert by `multi_layer_copy`, which the CPU emulation replaces by plain JAX. The pull is posted before P registers,
    while in serving it comes a router's round trip later.
    """

    def __init__(self, case: HandoffCase, pools: Pools, peer: Any) -> None:
        from jax.experimental import transfer

        from sgl_pd_connector.testing import cpu_emulation

        if jax.default_backend() == "cpu":
            cpu_emulation.install()
        from tpu_inference.distributed import tpu_connector

        self._stock = tpu_connector
        self._case = case
        self._pools = pools
        device = jax.local_devices()[0]
        self._server = transfer.start_transfer_server(
            device.client,
            "127.0.0.1:0",
            ["127.0.0.1:0"] * 8,
            max_num_parallel_copies=8,
            transfer_size=256 << 20,
            use_raw_buffers=False,
        )
        self._mesh = jax.sharding.Mesh(np.array([device]), ("model",))
        self._offered: list[list[jax.Array]] = []
        self._pulling: list[tuple[list[jax.Array], list[int]]] = []
        if peer is not None:
            self._link = self._server.connect(peer)

    def address(self) -> str:
        address: str = self._server.address()
        return address

    def arm(self, number: int) -> None:
        sharding = self._pools.get_pools()[0].sharding
        shape = (self._case.pages, *self._case.shape.page_shape)
        spec = jax.ShapeDtypeStruct(shape, self._case.shape.dtype, sharding=sharding)
        specs = [spec] * self._case.shape.layers
        self._pulling = [
            (self._link.pull(number * MAX_CONCURRENT + index, specs), page_ids)
            for index, page_ids in enumerate(self._pools.page_ids)
        ]

    def fire(self, number: int) -> None:
        pools = self._pools.get_pools()
        self._offered = [
            self._stock.select_from_kv_caches(pools, jnp.asarray(page_ids, jnp.int32))
            for page_ids in self._pools.page_ids
        ]
        for index, layers in enumerate(self._offered):
            self._server.await_pull(number * MAX_CONCURRENT + index, layers)

    def land(self) -> None:
        spec = jax.sharding.PartitionSpec()
        while self._pulling:
            ready = [each for each in self._pulling if all(array.is_ready() for array in each[0])]  # type: ignore[attr-defined]
            for layers, page_ids in ready:
                pools = self._pools.get_pools()
                self._pools.set_pools(self._stock.insert_kv_chunks(pools, layers, page_ids, self._mesh, spec))
            self._pulling = [each for each in self._pulling if not any(each is done for done in ready)]
            time.sleep(0.001 if self._pulling else 0.0)
        jax.block_until_ready(self._pools.get_pools())

    def close(self) -> None:
        self._offered.clear()


SYSTEMS: dict[str, type[System]] = {"ours": Ours, "raw": Raw, "tcp": Tcp, "tpu_connector": TpuConnector}
