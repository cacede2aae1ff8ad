"""What a process of `tests.support.engine_pair` does: real manager, real transfer servers, toy pools, no engine.

It obeys commands that come through a pipe and answers each. The main thread plays the engine: it carries out the
commands between steps, and steps whether or not there are any. It ends when the pipe does: it never outlives a test.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import socket
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from sgl_pd_connector.base import BaseKVReceiver, BaseKVSender, KVPoll
from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer
from sgl_pd_connector.config import load_config
from sgl_pd_connector.transfer.manager import JaxTransferKVManager
from sgl_pd_connector.transfer.pool import kv_args

STEP_S = 0.001


class ToyRunner:
    """Pools of random bytes (P) or zeros (D), replaced at every forward as an engine replaces them."""

    def __init__(self, pool: dict[str, Any], seed: int | None) -> None:
        dtype = np.dtype(getattr(ml_dtypes, pool["dtype"], pool["dtype"]))
        shape = (pool["num_pages"], pool["page_size"], *pool["token_shape"])
        nbytes = int(np.prod(shape)) * dtype.itemsize
        random = np.random.default_rng(seed)
        self._pools = [
            jnp.asarray(
                np.frombuffer(random.bytes(nbytes) if seed is not None else bytes(nbytes), np.uint8)
                .view(dtype)
                .reshape(shape)
            )
            for _ in range(pool["num_layers"])
        ]
        self._forward = jax.jit(
            lambda pools: [jax.lax.optimization_barrier(p) for p in pools], donate_argnums=0
        )

    def get_pools(self) -> list[jax.Array]:
        return list(self._pools)

    def set_pools(self, pools: list[jax.Array]) -> None:
        self._pools = pools

    def forward(self) -> None:
        """What an engine does to its pools: donates them, so that references kept across a step are dead."""
        self._pools = self._forward(self._pools)

    def digests(self, pages: list[int]) -> list[str]:
        """A digest of the bytes of each page over all layers."""
        layers = [np.asarray(pool).view(np.uint8) for pool in self._pools]
        return [
            hashlib.sha256(b"".join(layer[page].tobytes() for layer in layers)).hexdigest() for page in pages
        ]

    def fill(self, pages: list[int], value: int) -> None:
        """Overwrites pages, like the next request that they are given to."""
        ids = jnp.asarray(pages)
        self._pools = [
            pool.at[ids].set(jnp.asarray(np.full(pool.shape[1:], value, pool.dtype))) for pool in self._pools
        ]


class Process:
    """What every kind of process can be asked."""

    def do_resources(self) -> dict[str, int]:
        """What could leak: descriptors, Python's threads and the native ones."""
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "native_threads": len(os.listdir("/proc/self/task")),
        }

    def do_rss(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Engine(Process):
    """Carries out the commands; each ``do_NAME`` is one."""

    def __init__(self, spec: dict[str, Any]) -> None:
        config = load_config(spec["config"], where="test", environ={})
        self._runner = ToyRunner(spec["pool"], spec["seed"])
        args = kv_args(self._runner.get_pools(), spec["pool"]["page_size"])
        self._manager = JaxTransferKVManager(args, spec["bootstrap"], role=spec["role"], config=config)
        self._manager.register_runner(self._runner)
        self._transfers: dict[str, BaseKVSender | BaseKVReceiver] = {}
        self._stepping = True

    def step(self) -> None:
        if self._stepping:
            self._runner.forward()
            self._manager.step()

    def do_hello(self) -> dict[str, Any]:
        return {"bootstrap": self._manager.bootstrap_addr, "pid": os.getpid()}

    def do_stepping(self, on: bool) -> None:
        """An engine that is busy, or has stopped, does not step."""
        self._stepping = on

    def do_sender(self, name: str, room: int, prompt: bytes, num_tokens: int) -> None:
        self._transfers[name] = self._manager.create_sender(room, prompt, num_tokens)

    def do_receiver(
        self, name: str, room: int, prompt: bytes, num_tokens: int | None, bootstrap: str | None
    ) -> None:
        self._transfers[name] = self._manager.create_receiver(room, prompt, num_tokens, bootstrap)

    def do_refuse(self, room: int, bootstrap: str) -> None:
        self._manager.refuse(room, "too long", bootstrap)

    def do_send(self, name: str, pages: list[int]) -> bool:
        sender = self._transfers[name]
        assert isinstance(sender, BaseKVSender)
        return sender.send(pages)

    def do_receive(self, name: str, pages: list[int], skip: int) -> None:
        receiver = self._transfers[name]
        assert isinstance(receiver, BaseKVReceiver)
        receiver.receive(pages, skip_pages=skip)

    def do_abort(self, name: str, reason: str) -> None:
        self._transfers[name].abort(reason)

    def do_poll(self, name: str) -> dict[str, Any]:
        transfer = self._transfers[name]
        state = transfer.poll()
        error = transfer.failure_exception() if state is KVPoll.Failed else None
        released = transfer.released if isinstance(transfer, BaseKVSender) else None
        return {
            "state": state.name,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "released": released,
        }

    def do_forget(self, name: str) -> None:
        del self._transfers[name]

    def do_digests(self, pages: list[int]) -> list[str]:
        return self._runner.digests(pages)

    def do_fill(self, pages: list[int], value: int) -> None:
        self._runner.fill(pages, value)

    def do_stats(self) -> dict[str, Any]:
        return vars(self._manager.stats())

    def do_records(self) -> list[dict[str, Any]]:
        return [record.as_dict() for record in self._manager.take_records()]

    def do_cut_transfers(self, spare: list[int]) -> int:
        cut = 0
        for path in Path("/proc/self/fd").iterdir():
            # Other threads open and close what they like meanwhile.
            with contextlib.suppress(OSError):
                if not os.readlink(path).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    if connection.family is socket.AF_INET and connection.getsockname()[1] not in spare:
                        connection.getpeername()  # not those that listen
                        connection.shutdown(socket.SHUT_RDWR)
                        cut += 1
        return cut

    def do_close(self) -> None:
        self._manager.close()


class Bootstrap(Process):
    """The bootstrap server as a process of its own."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._server = HTTPBootstrapServer(
            "127.0.0.1", spec["port"], ttl=spec["config"].get("heartbeat_ttl", 15.0)
        )
        self._server.start()

    def step(self) -> None: ...

    def do_hello(self) -> dict[str, Any]:
        return {"bootstrap": str(self._server.address), "pid": os.getpid()}

    def do_close(self) -> None:
        self._server.stop()


def main(pipe: Connection, spec: dict[str, Any]) -> None:
    jax.config.update("jax_platforms", "cpu")
    for constant, value in spec["constants"].items():
        module, _, name = constant.rpartition(".")
        setattr(importlib.import_module(module), name, value)
    process = Bootstrap(spec) if spec["role"] == "bootstrap" else Engine(spec)
    while True:
        if pipe.poll(STEP_S):
            try:
                command = pipe.recv()
            except EOFError:
                break
            try:
                answer = getattr(process, "do_" + command.pop("do"))(**command), None
            except Exception:  # noqa: BLE001 - told to the test, which decides
                answer = None, traceback.format_exc()
            pipe.send(answer)
        process.step()
    process.do_close()
