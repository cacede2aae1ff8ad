"""From pages in P's pool to pages in D's: two processes, no model.

Each system is two halves, one per process, driven in step by the parent. A round is: D gets ready to receive, P offers,
and the time counts from the start of P's offer to the moment when D has everything where it belongs. Both clocks are
the machine's monotonic one.

========== =====================================================================================================
ours       gather -> register -> READY -> pull -> wait -> scatter -> DONE, through `JaxTransferKVManager`
raw        one `jax.experimental.transfer` pull of the same bytes in one array: the limit of that backend
tcp        one TCP connection, warm buffers on both sides: the limit of the machine's loopback
memcpy     one copy within D: the limit of its memory
========== =====================================================================================================
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from sgl_pd_connector.bench.measure import Comparison, compare
from sgl_pd_connector.bench.shapes import KVShape

SYSTEMS = ("ours", "raw", "tcp", "memcpy")
CHANNELS = 4
TRANSFER_SIZE = 16 << 20
WAIT_SECONDS = 120.0


@dataclass(frozen=True)
class HandoffCase:
    """What is moved: ``concurrent`` requests of ``pages`` pages each."""

    shape: KVShape
    pages: int
    concurrent: int = 1

    @property
    def nbytes(self) -> int:
        return self.pages * self.shape.page_bytes * self.concurrent


class _Pools:
    """The pools of one process, as an engine's runner has them."""

    def __init__(self, shape: KVShape, num_pages: int) -> None:
        import jax.numpy as jnp

        self._pools = [jnp.zeros((num_pages, *shape.page_shape), shape.dtype) for _ in range(shape.layers)]

    def get_pools(self) -> list[Any]:
        return list(self._pools)

    def set_pools(self, pools: list[Any]) -> None:
        self._pools = pools


class _Half:
    """One process's part in every system. The parent calls `arm` on D, then `fire` on P, then `land` on D."""

    def __init__(self, role: str, case: HandoffCase, peer: dict[str, Any] | None) -> None:
        import jax
        import jax.numpy as jnp

        from sgl_pd_connector.config import load_config
        from sgl_pd_connector.transfer import JaxTransferKVManager, kv_args
        from sgl_pd_connector.transfer.engine import JaxTransferKVEngine
        from sgl_pd_connector.transfer.transport import Peer

        self.case = case
        self.peer = peer
        total = case.pages * case.concurrent
        self.pools = _Pools(case.shape, total + 1)
        budget = max(1 << 30, 2 * case.nbytes)
        config = load_config(
            {"bootstrap_port": 0, "max_packed_bytes": budget, "max_pulled_bytes": budget},
            where="bench",
            environ={},
        )
        args = kv_args(self.pools.get_pools(), case.shape.page_size)
        self.manager = JaxTransferKVManager(
            args, None, role="prefill" if role == "p" else "decode", config=config
        )
        self.manager.register_runner(self.pools)
        self.pages = [
            list(range(1 + index * case.pages, 1 + (index + 1) * case.pages))
            for index in range(case.concurrent)
        ]
        self.tokens = case.pages * case.shape.page_size
        self.engine = JaxTransferKVEngine(
            host="127.0.0.1", port=0, channels=CHANNELS, transfer_size=TRANSFER_SIZE, serve=role == "p"
        )
        self.flat = jnp.zeros((case.nbytes,), jnp.uint8) if role == "p" else None
        self.spec = jax.ShapeDtypeStruct(
            (case.nbytes,), jnp.uint8, sharding=jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        )
        self.buffer = np.zeros(case.nbytes, np.uint8)
        self.target = np.zeros(case.nbytes, np.uint8)
        self.pending: Any = None
        if role == "p":
            self.listener = socket.create_server(("127.0.0.1", 0))
        elif peer is not None:
            self.link = self.engine.link(Peer("bench", 1, peer["transfer_addr"]))
            self.connection = socket.create_connection(("127.0.0.1", peer["tcp_port"]))

    def about(self) -> dict[str, Any]:
        return {
            "bootstrap": self.manager.bootstrap_addr,
            "transfer_addr": self.engine.transfer_addr,
            "tcp_port": self.listener.getsockname()[1],
        }

    def accept(self) -> None:
        self.connection, _ = self.listener.accept()

    # D.

    def arm(self, system: str, number: int) -> None:
        assert self.peer is not None
        if system == "ours":
            self.pending = [
                self.manager.create_receiver(number * 1000 + index, b"", self.tokens, self.peer["bootstrap"])
                for index in range(self.case.concurrent)
            ]
        elif system == "raw":
            self.pending = self.link.pull(number, [self.spec])

    def land(self, system: str) -> float:
        if system == "ours":
            self._land_ours()
        elif system == "raw":
            (array,) = self.pending
            array.block_until_ready()
        elif system == "tcp":
            view = memoryview(self.target)
            while view:
                view = view[self.connection.recv_into(view) :]
        done = time.monotonic()
        self.pending = None
        return done

    def _land_ours(self) -> None:
        from sgl_pd_connector.base import KVPoll

        waiting = list(enumerate(self.pending))
        deadline = time.monotonic() + WAIT_SECONDS
        while waiting:
            self.manager.step()
            left = []
            for index, receiver in waiting:
                state = receiver.poll()
                if state is KVPoll.Failed:
                    raise receiver.failure_exception()
                if state is KVPoll.WaitingForInput:
                    receiver.receive(self.pages[index])
                if state is not KVPoll.Success:
                    left.append((index, receiver))
            waiting = left
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(waiting)} transfers did not end in {WAIT_SECONDS:g} s")
            time.sleep(0.0001)

    def copy(self) -> float:
        began = time.monotonic()
        np.copyto(self.target, self.buffer)
        return time.monotonic() - began

    # P.

    def fire(self, system: str, number: int) -> float:
        began = time.monotonic()
        if system == "ours":
            for index in range(self.case.concurrent):
                sender = self.manager.create_sender(number * 1000 + index, b"", self.tokens)
                sender.send(self.pages[index])
        elif system == "raw":
            self.engine.register(number, [self.flat], WAIT_SECONDS)  # type: ignore[list-item]
        elif system == "tcp":
            self.connection.sendall(self.buffer)
        return began

    def figures(self) -> dict[str, Any]:
        """Stage times, counters and memory of this process's manager."""
        records = [record.as_dict() for record in self.manager.take_records()]
        return {
            "records": records,
            "stats": vars(self.manager.stats()),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def close(self) -> None:
        self.manager.close()
        self.engine.close()
        self.connection.close()


def _serve(pipe: Connection, role: str, case: HandoffCase, peer: dict[str, Any] | None) -> None:
    """A process: carries out the parent's calls on its half."""
    half = _Half(role, case, peer)
    pipe.send(None)
    while True:
        name, arguments = pipe.recv()
        try:
            result = getattr(half, name)(*arguments)
        except Exception as error:  # noqa: BLE001 - the parent reports it
            pipe.send(error)
            continue
        pipe.send(result)
        if name == "close":
            return


class _Remote:
    """The parent's end of a process."""

    def __init__(self, role: str, case: HandoffCase, peer: dict[str, Any] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, role, case, peer), daemon=True)
        self.process.start()
        self.pipe.recv()

    def start(self, name: str, *arguments: Any) -> None:
        self.pipe.send((name, arguments))

    def result(self) -> Any:
        result = self.pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.start(name, *arguments)
        return self.result()

    def close(self) -> None:
        self("close")
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


@contextmanager
def _pair(case: HandoffCase) -> Iterator[tuple[_Remote, _Remote]]:
    p = _Remote("p", case, None)
    try:
        about = p("about")
        p.start("accept")
        d = _Remote("d", case, about)
        try:
            p.result()
            yield p, d
        finally:
            d.close()
    finally:
        p.close()


@dataclass(frozen=True)
class HandoffResult:
    """What one case gave: times by system, and what the two processes counted."""

    case: HandoffCase
    comparison: Comparison
    prefill: dict[str, Any]
    decode: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        comparison = self.comparison
        rounds = comparison.rounds
        moved = self.decode["stats"]["nbytes"]
        transfers = self.decode["stats"]["ok"]
        return {
            "model": self.case.shape.name,
            "nbytes": self.case.nbytes,
            "concurrent": self.case.concurrent,
            "rounds": rounds,
            "median_s": {name: comparison.median(name) for name in comparison.seconds},
            "gb_per_s": {
                name: self.case.nbytes / comparison.median(name) / 1e9 for name in comparison.seconds
            },
            "ratio_to_raw": comparison.ratio("ours", to="raw"),
            "overhead_s": comparison.median("ours") - comparison.median("raw"),
            "wire_bytes_per_page_byte": moved / (transfers * self.case.nbytes / self.case.concurrent),
            "compilations": {
                "prefill": self.prefill["stats"]["compilations"],
                "decode": self.decode["stats"]["compilations"],
            },
            "peak_rss_bytes": {
                "prefill": self.prefill["peak_rss_bytes"],
                "decode": self.decode["peak_rss_bytes"],
            },
            "stages_s": _stages(self.decode["records"]),
        }


def _stages(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of D's stages: waiting for P, allocating, pulling, writing."""
    moved = [record for record in records if record["outcome"] == "ok"]
    return {
        "ready": float(np.median([record["bootstrap_s"] for record in moved])),
        "allocate": float(np.median([record["input_s"] for record in moved])),
        "pull": float(np.median([record["pull_s"] for record in moved])),
        "write": float(np.median([record["transfer_s"] - record["pull_s"] for record in moved])),
    }


def run_case(case: HandoffCase, *, rounds: int) -> HandoffResult:
    """Measures every system on one case, in alternation, in one pair of processes."""
    numbers = iter(range(1, 1 << 30))
    with _pair(case) as (p, d):

        def once(system: str) -> float:
            number = next(numbers)
            d("arm", system, number)
            d.start("land", system)
            began: float = p("fire", system, number)
            done: float = d.result()
            return done - began

        comparison = compare(
            {
                "ours": lambda: once("ours"),
                "raw": lambda: once("raw"),
                "tcp": lambda: once("tcp"),
                "memcpy": lambda: float(d("copy")),
            },
            rounds=rounds,
            warmup=2,
        )
        return HandoffResult(case, comparison, p("figures"), d("figures"))
