"""The control plane: what the bootstrap server and the side channel cost as a deployment grows.

The server under test is always alone in its process, so that its CPU time is the kernel's account of that process;
whatever loads it is in others.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from sgl_pd_connector.bench.handoff import HandoffPair
from sgl_pd_connector.bench.measure import quantile, slope
from sgl_pd_connector.bench.shapes import SHAPES, HandoffCase
from sgl_pd_connector.bootstrap.client import BootstrapClient
from sgl_pd_connector.errors import PDError
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.routes import Heartbeat, Rank, Route

HEARTBEAT_SECONDS = 5.0
TTL = 300.0
"""Longer than registering thousands of ranks takes, after which the heartbeats begin."""

RANKS_PER_PROCESS = 64
LOOKUP_PAUSE = 0.02
CONNECTIONS = 64
"""Open at once while loading: a server has its own bound, and instances do not call in step."""


# The bootstrap server.


def bootstrap(ranks: int, *, ranks_per_process: int, seconds: float) -> dict[str, Any]:
    """A bootstrap server with ``ranks`` registered and their heartbeats.

    Args:
        ranks: registered, in all.
        ranks_per_process: how many one process has, and so one heartbeat names.
        seconds: how long to measure heartbeats alone, and then look-ups beside them.
    """
    instances = [
        _routes(number, min(ranks_per_process, ranks - first))
        for number, first in enumerate(range(0, ranks, ranks_per_process))
    ]
    with _process(_serve_bootstrap) as (server, pipe):
        address = Address.parse(pipe.recv(), setting="address")
        puts = [_request("PUT", "/route", route.wire_json) for routes in instances for route in routes]
        began = time.monotonic()
        asyncio.run(_send_all(address, puts))
        registering = time.monotonic() - began
        beats = [
            _request("POST", "/heartbeat", _heartbeat(routes).model_dump_json().encode())
            for routes in instances
        ]
        with _process(_send_heartbeats, address, beats) as (_, sender):
            sender.recv()
            cpu, began = cpu_seconds(server), time.monotonic()
            time.sleep(seconds)
            share = (cpu_seconds(server) - cpu) / (time.monotonic() - began)
            # After that window, so that the look-ups' own cost is not in it; heartbeats go on.
            lookups = _look_up(address, instances, until=time.monotonic() + seconds)
            sender.send(None)
            sent, late = sender.recv()
        began = time.monotonic()
        with BootstrapClient(address, timeout=60.0) as client:
            listed = len(client.list("prefill"))
        listing = time.monotonic() - began
    return {
        "ranks": ranks,
        "ranks_per_process": ranks_per_process,
        "still_registered": listed,
        "registrations_per_s": ranks / registering,
        "heartbeats_per_s": sent,
        "heartbeat_late_s": late,
        "cpu_share": share,
        "lookups": len(lookups),
        "lookup_s": {"p50": quantile(lookups, 0.5), "p99": quantile(lookups, 0.99)},
        "list_all_s": listing,
    }


def _routes(number: int, ranks: int) -> list[Route]:
    return [
        Route.model_validate(
            {
                "role": "prefill",
                "instance_id": f"prefill-{number}",
                "epoch": 1,
                **dict.fromkeys(("cp_rank", "dp_rank", "pp_rank"), 0),
                **dict.fromkeys(("cp_size", "dp_size", "pp_size"), 1),
                "tp_rank": rank,
                "tp_size": ranks,
                "transfer_addr": "10.0.0.1:40001",
                "zmq_addr": "10.0.0.1:40002",
                "page_size": 16,
                "kv_dtype": "bfloat16",
                "mesh_meta": {"axes": {"tensor": ranks}},
                "layout_digest": "0" * 64,
                "transfer_channels": 4,
                "transfer_size": 16 << 20,
            }
        )
        for rank in range(ranks)
    ]


def _heartbeat(routes: Sequence[Route]) -> Heartbeat:
    first = routes[0]
    ranks = [Rank(route.tp_rank, 0, 0, 0) for route in routes]
    return Heartbeat(role=first.role, instance_id=first.instance_id, epoch=first.epoch, ranks=ranks)


def _look_up(address: Address, instances: Sequence[Sequence[Route]], *, until: float) -> list[float]:
    """Seconds of each look-up of one route, made now and then as decode instances do."""
    taken: list[float] = []
    with BootstrapClient(address) as client:
        while time.monotonic() < until:
            routes = instances[len(taken) * 7919 % len(instances)]
            began = time.monotonic()
            if client.get(routes[-1].key) is None:
                raise PDError(f"{routes[-1].key} is not registered: heartbeats came too late")
            taken.append(time.monotonic() - began)
            time.sleep(LOOKUP_PAUSE)
    return taken


def _serve_bootstrap(pipe: Connection) -> None:
    from sgl_pd_connector.bootstrap.server import HTTPBootstrapServer

    server = HTTPBootstrapServer("127.0.0.1", 0, ttl=TTL)
    server.start()
    pipe.send(str(server.address))
    pipe.recv()
    server.stop()


def _send_heartbeats(pipe: Connection, address: Address, beats: Sequence[bytes]) -> None:
    asyncio.run(_keep_beating(pipe, address, beats))


async def _keep_beating(pipe: Connection, address: Address, beats: Sequence[bytes]) -> None:
    """Each instance every `HEARTBEAT_SECONDS`, spread evenly, over a new connection as the real client does."""
    pipe.send(None)
    pause = HEARTBEAT_SECONDS / len(beats)
    start = time.monotonic()
    sent, late = 0, 0.0
    slots = asyncio.Semaphore(CONNECTIONS)
    tasks: set[asyncio.Task[None]] = set()
    while not pipe.poll():
        now = time.monotonic()
        while start + sent * pause <= now:
            task = asyncio.create_task(_send(address, beats[sent % len(beats)], slots))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        late = max(late, len(tasks) * pause)
        await asyncio.sleep(max(0.002, start + sent * pause - time.monotonic()))
    rate = (sent - len(tasks)) / (time.monotonic() - start)
    await asyncio.gather(*tasks)
    pipe.send((rate, late))


async def _send_all(address: Address, requests: Sequence[bytes]) -> None:
    slots = asyncio.Semaphore(CONNECTIONS)
    await asyncio.gather(*(_send(address, request, slots) for request in requests))


async def _send(address: Address, request: bytes, slots: asyncio.Semaphore) -> None:
    """One request over a connection of its own. Raises `PDError` for any answer but 200."""
    async with slots:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise PDError(f"the bootstrap server refused a request: {answer[:200]!r}")


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


# The side channel.


def side_channel(messages: int) -> dict[str, Any]:
    """SUBSCRIBE -> WAIT against a P that has none of the rooms; each pair is two messages."""
    from sgl_pd_connector.wire import messages as msg
    from sgl_pd_connector.wire.frames import FrameCodec

    codec, window = FrameCodec(None), 256
    now = time.time()
    frames = [
        codec.encode(
            msg.Subscribe(
                room=number, attempt=number, prompt=b"", epoch=1, instance_id="d", layout_digest="bench"
            ),
            now,
        )
        for number in range(messages)
    ]
    with _process(_serve_side_channel) as (server, pipe), zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://{pipe.recv()}")
        cpu, began = cpu_seconds(server), time.monotonic()
        answered = 0
        for number, frame in enumerate(frames):
            socket.send(frame)
            if number >= window:
                socket.recv()
                answered += 1
        while answered < messages:
            socket.recv()
            answered += 1
        seconds = time.monotonic() - began
        busy = cpu_seconds(server) - cpu
        socket.close()
    return {
        "rooms": messages,
        "messages_per_s": 2 * messages / seconds,
        "cpu_s_per_message": busy / (2 * messages),
    }


def _serve_side_channel(pipe: Connection) -> None:
    from sgl_pd_connector.transfer.budget import ByteBudget
    from sgl_pd_connector.transfer.offers import OfferTable, Timeouts
    from sgl_pd_connector.transfer.prefill_channel import PrefillChannel
    from sgl_pd_connector.wire.frames import FrameCodec

    table = OfferTable(
        timeouts=Timeouts(60.0, 600.0, 60.0),
        epoch=1,
        layout_digest="bench",
        ready=_never,
        new_uuid=_never,
        ended=_never,
    )
    channel = PrefillChannel(
        table,
        transport=_NoTransport(),
        budget=ByteBudget(1),
        codec=FrameCodec(None),
        address=Address("127.0.0.1", 0),
        peer_timeout=10.0,
        offer_lifetime=60.0,
    )
    pipe.send(channel.zmq_addr)
    pipe.recv()
    channel.close()


def _never(*_: object) -> Any:
    raise AssertionError("no request was made on this P")


class _NoTransport:
    """For a P that offers nothing."""

    register = release = link = _never

    def sweep(self) -> None:
        pass


# Rooms in flight.


def rooms(count: int, *, rounds: int) -> dict[str, Any]:
    """``count`` requests of one small page each, all waiting on D before P has any of them."""
    case = HandoffCase(SHAPES["tiny"], pages=1, concurrent=count)
    with HandoffPair() as pair:
        result = pair.run(case, rounds=rounds, systems=("ours",))
    taken = result.comparison.median("ours")
    return {"rooms": count, "seconds": taken, "seconds_per_room": taken / count}


def run(*, quick: bool, rounds: int) -> dict[str, Any]:
    """Everything, as the report's section ``control``."""
    window = 10.0 if quick else 30.0
    sizes = (1_000, 10_000) if quick else (1_000, 3_000, 10_000)
    grown = [bootstrap(size, ranks_per_process=RANKS_PER_PROCESS, seconds=window) for size in sizes]
    alone = bootstrap(sizes[-1], ranks_per_process=1, seconds=window)
    channels = [side_channel(count) for count in ((2_000, 20_000) if quick else (2_000, 10_000, 50_000))]
    flights = [rooms(count, rounds=rounds) for count in ((100, 1_000) if quick else (100, 300, 1_000))]
    return {
        "bootstrap": grown,
        "bootstrap_one_rank_per_process": alone,
        "side_channel": channels,
        "rooms": flights,
        "cpu_share": grown[-1]["cpu_share"],
        "lookup_p50_s": grown[-1]["lookup_s"]["p50"],
        "lookup_p99_s": grown[-1]["lookup_s"]["p99"],
        "messages_per_s": channels[-1]["messages_per_s"],
        "slope": {
            "cpu share by ranks": slope(sizes, [each["cpu_share"] for each in grown]),
            "look-up by ranks": slope(sizes, [each["lookup_s"]["p50"] for each in grown]),
            "list of all by ranks": slope(sizes, [each["list_all_s"] for each in grown]),
            "side channel by rooms": slope(
                [each["rooms"] for each in channels],
                [each["rooms"] / each["messages_per_s"] for each in channels],
            ),
            "time by rooms in flight": slope(
                [each["rooms"] for each in flights], [each["seconds"] for each in flights]
            ),
        },
    }


# Processes.


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[tuple[int, Connection]]:
    """Runs ``target(pipe, *arguments)`` in a process of its own, and ends it by a message."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        yield process.pid, ours
    finally:
        if process.is_alive():
            with suppress(BrokenPipeError):
                ours.send(None)
            process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()
        process.close()
