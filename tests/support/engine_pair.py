"""Drives prefill, decode and bootstrap processes from a test: real processes, real sockets, no engine.

    with EnginePair(POOL) as pair:
        moved = pair.start(num_tokens=50)
        moved.finish()
        assert pair.d.digests(moved.d_pages) == pair.p.digests(moved.p_pages)

A process can be killed, stopped and continued.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from typing import Any, Self

from sgl_pd_connector.testing.servers import free_ports
from sgl_pd_connector.wire.rooms import prompt_digest
from tests.support import engine_process
from tests.waiting import eventually

START_S = 120.0
ANSWER_S = 60.0
EXIT_S = 30.0


def start_fork_server() -> None:
    """Once per session, before any test is watched for what it leaves behind."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([engine_process.__name__])
    forkserver.ensure_running()


def free_port() -> int:
    (port,) = free_ports(1)
    return port


class RemoteError(Exception):
    """A command raised in the process; the text is its traceback."""


class ProcessDiedError(Exception):
    """The process ended instead of answering."""


@dataclass(frozen=True)
class ToyPool:
    """Shape of the toy pools: ``[num_pages, page_size, *token_shape]`` for each layer."""

    dtype: str = "bfloat16"
    num_layers: int = 4
    num_pages: int = 64
    page_size: int = 4
    token_shape: tuple[int, ...] = (2, 8)

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


class EngineProcess:
    """One process. Commands are methods that block until it has answered."""

    def __init__(
        self,
        role: str,
        pool: ToyPool = ToyPool(),
        *,
        bootstrap: str | None = None,
        port: int = 0,
        seed: int | None = None,
        config: dict[str, Any] | None = None,
        constants: dict[str, float] | None = None,
        spawn: bool = False,
    ) -> None:
        """Starts it; `ready` waits until it serves.

        Args:
            role: prefill, decode or bootstrap.
            pool: its pools.
            bootstrap: address of the bootstrap server; None for its own (prefill) or each request's (decode).
            port: of a bootstrap process; 0 takes a free one.
            seed: fills the pools with random bytes; None with zeros.
            config: settings that differ from the defaults.
            constants: of the package, as ``module.NAME``, that a test cannot wait for.
            spawn: whether it starts from nothing and ends like a program.
        """
        self.role = role
        self._closed = False
        self._status = 0
        spec = {
            "role": role,
            "pool": vars(pool),
            "bootstrap": bootstrap,
            "port": port,
            "seed": seed,
            "config": {"bootstrap_port": 0} | (config or {}),
            "constants": constants or {},
        }
        # Forked from a server that has imported everything, it starts in a fraction of the time. Spawned, it also ends
        # like any program, with the interpreter's own finalisation.
        context = multiprocessing.get_context("spawn" if spawn else "forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=engine_process.main, args=(theirs, spec), daemon=True)
        self._process.start()
        theirs.close()
        self.bootstrap = ""

    def ready(self) -> Self:
        self.bootstrap = self._call("hello", within=START_S)["bootstrap"]
        return self

    def _call(self, do: str, within: float = ANSWER_S, **arguments: Any) -> Any:
        try:
            self._pipe.send({"do": do, **arguments})
            if not self._pipe.poll(within):
                raise AssertionError(f"the {self.role} process did not answer {do!r} within {within:g} s")
            result, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(EXIT_S)
            raise ProcessDiedError(f"the {self.role} process ended with {self._process.exitcode}") from None
        if error is not None:
            raise RemoteError(error)
        return result

    # Commands.

    def stepping(self, on: bool) -> None:
        """Whether the engine steps."""
        self._call("stepping", on=on)

    def sender(self, name: str, room: int, prompt: bytes, num_tokens: int) -> Transfer:
        self._call("sender", name=name, room=room, prompt=prompt, num_tokens=num_tokens)
        return Transfer(self, name)

    def receiver(
        self, name: str, room: int, prompt: bytes, num_tokens: int | None = None, bootstrap: str | None = None
    ) -> Transfer:
        self._call(
            "receiver", name=name, room=room, prompt=prompt, num_tokens=num_tokens, bootstrap=bootstrap
        )
        return Transfer(self, name)

    def refuse(self, room: int, bootstrap: str) -> None:
        """D's HTTP server refuses a request."""
        self._call("refuse", room=room, bootstrap=bootstrap)

    def digests(self, pages: Sequence[int]) -> list[str]:
        """One digest per page, over the bytes of all layers."""
        result: list[str] = self._call("digests", pages=list(pages))
        return result

    def fill(self, pages: Sequence[int], value: int) -> None:
        """Overwrites pages."""
        self._call("fill", pages=list(pages), value=value)

    def stats(self) -> dict[str, int]:
        result: dict[str, int] = self._call("stats")
        return result

    def records(self) -> list[dict[str, Any]]:
        """Transfers that ended since the last call."""
        result: list[dict[str, Any]] = self._call("records")
        return result

    def resources(self) -> dict[str, int]:
        result: dict[str, int] = self._call("resources")
        return result

    def rss(self) -> int:
        """Resident memory, in bytes."""
        result: int = self._call("rss")
        return result

    def cut_transfers(self, spare: Sequence[int]) -> int:
        """Breaks the process's TCP connections, but for those of its ports in ``spare``; returns how many."""
        result: int = self._call("cut_transfers", spare=list(spare))
        return result

    def close_manager(self) -> None:
        """Like the end of an engine's service; the process stays."""
        self._call("close")

    # Life and death.

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.join(EXIT_S)

    def stop(self) -> None:
        """Freezes it, like a paused virtual machine."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> int:
        """Ends it in order and returns its exit status, negative for a signal. Can be called again."""
        if not self._closed:
            self._closed = True
            if self._process.is_alive():
                self.resume()
            self._pipe.close()
            self._process.join(EXIT_S)
            ended = not self._process.is_alive()
            if not ended:
                self.kill()
            self._status = self._process.exitcode or 0
            self._process.close()
            assert ended, f"the {self.role} process did not end within {EXIT_S:g} s"
        return self._status


@dataclass(frozen=True)
class Transfer:
    """A sender or receiver in a process."""

    process: EngineProcess
    name: str

    def send(self, pages: Sequence[int]) -> bool:
        result: bool = self.process._call("send", name=self.name, pages=list(pages))
        return result

    def receive(self, pages: Sequence[int], skip: int = 0) -> None:
        self.process._call("receive", name=self.name, pages=list(pages), skip=skip)

    def abort(self, reason: str = "client gone") -> None:
        self.process._call("abort", name=self.name, reason=reason)

    def forget(self) -> None:
        """Drops it, as an engine drops what is over."""
        self.process._call("forget", name=self.name)

    def poll(self) -> dict[str, Any]:
        result: dict[str, Any] = self.process._call("poll", name=self.name)
        return result

    @property
    def state(self) -> str:
        state: str = self.poll()["state"]
        return state

    @property
    def error(self) -> str:
        error: str | None = self.poll()["error"]
        return error or ""

    @property
    def released(self) -> bool:
        released: bool = self.poll()["released"]
        return released

    def wait(self, *states: str, within: float = 30.0) -> str:
        """Waits until it is in one of ``states`` and returns which; fails at once when it ends otherwise."""
        seen: list[dict[str, Any]] = []

        def arrived() -> bool:
            seen[:] = [self.poll()]
            state = seen[0]["state"]
            assert state in states or state not in ("Success", "Failed"), f"{self.name}: {seen[0]}"
            return state in states

        eventually(arrived, f"{self.name} in {states}", within)
        return str(seen[0]["state"])


@dataclass
class Moved:
    """One request on its way from P to D."""

    num_tokens: int
    p_pages: list[int]
    d_pages: list[int]
    sender: Transfer
    receiver: Transfer

    def offer(self) -> None:
        """Brings it to where D can pull."""
        assert self.sender.send(self.p_pages)
        self.receiver.wait("WaitingForInput")

    def pull(self) -> None:
        """Brings it to where D pulls."""
        self.offer()
        self.receiver.receive(self.d_pages)

    def finish(self, within: float = 30.0) -> None:
        """Drives it from wherever it is to success on both sides."""
        if not self.sender.poll()["released"]:
            self.sender.send(self.p_pages)
        if (
            self.receiver.wait("WaitingForInput", "Transferring", "Success", within=within)
            == "WaitingForInput"
        ):
            self.receiver.receive(self.d_pages)
        self.receiver.wait("Success", within=within)
        self.sender.wait("Success", within=within)


@dataclass
class EnginePair:
    """A bootstrap, a prefill and a decode process. Entering it starts them; leaving it ends whatever is left."""

    pool: ToyPool = field(default_factory=ToyPool)
    p_config: dict[str, Any] = field(default_factory=dict)
    d_config: dict[str, Any] = field(default_factory=dict)
    own_bootstrap: bool = True
    """Whether the bootstrap server is a process of its own; else it runs inside P."""
    constants: dict[str, float] = field(default_factory=dict)
    """See `EngineProcess`."""

    def __enter__(self) -> Self:
        self._numbers = itertools.count(1)
        self._all: list[EngineProcess] = []
        self.bootstrap = self._started(EngineProcess("bootstrap")) if self.own_bootstrap else None
        address = None
        if self.bootstrap is not None:
            address = self.bootstrap.ready().bootstrap
        self.p = self._started(self.new_p(bootstrap=address))
        self.d = self._started(self.new_d())
        self.p.ready()
        self.d.ready()
        return self

    def __exit__(self, *_: object) -> None:
        statuses = {f"{process.role} process": process.close() for process in self._all}
        bad = {name: status for name, status in statuses.items() if status not in (0, -signal.SIGKILL)}
        assert not bad, f"did not end in order: {bad}"

    def _started(self, process: EngineProcess) -> EngineProcess:
        self._all.append(process)
        return process

    def new_p(self, *, bootstrap: str | None, **config: Any) -> EngineProcess:
        """Another P."""
        config = self.p_config | config
        return EngineProcess(
            "prefill", self.pool, bootstrap=bootstrap, seed=1, config=config, constants=self.constants
        )

    def new_d(self, *, spawn: bool = False, **config: Any) -> EngineProcess:
        """Another D; it is told each request's bootstrap server."""
        config = self.d_config | config
        return EngineProcess("decode", self.pool, config=config, constants=self.constants, spawn=spawn)

    def restart_p(self, **config: Any) -> EngineProcess:
        """Replaces P by a new one that registers at the same bootstrap server."""
        assert self.bootstrap is not None
        self.p = self._started(self.new_p(bootstrap=self.bootstrap.bootstrap, **config)).ready()
        return self.p

    def restart_bootstrap(self) -> EngineProcess:
        """Replaces the bootstrap server by an empty one at the same address."""
        assert self.bootstrap is not None
        port = int(self.bootstrap.bootstrap.rpartition(":")[2])
        self.bootstrap = self._started(EngineProcess("bootstrap", port=port)).ready()
        return self.bootstrap

    def restart_d(self, *, spawn: bool = False, **config: Any) -> EngineProcess:
        self.d = self._started(self.new_d(spawn=spawn, **config)).ready()
        return self.d

    def request(
        self, num_tokens: int, *, p_pages: Sequence[int] | None = None, d_pages: Sequence[int] | None = None
    ) -> Moved:
        """A request that both sides have just received; nothing is prefilled."""
        room = next(self._numbers)
        prompt = prompt_digest([room])
        count = self.pool.pages(num_tokens)
        sender = self.p.sender(f"s{room}", room, prompt, num_tokens)
        receiver = self.d.receiver(f"r{room}", room, prompt, num_tokens, self.p.bootstrap)
        return Moved(
            num_tokens,
            list(range(count)) if p_pages is None else list(p_pages),
            list(range(self.pool.num_pages - count, self.pool.num_pages))[::-1]
            if d_pages is None
            else list(d_pages),
            sender,
            receiver,
        )
