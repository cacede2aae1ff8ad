"""What the processes of a server hold of the machine: read from ``/proc``, so they need not cooperate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sgl_pd_connector.testing.servers import Server

KINDS = ("socket:", "pipe:", "anon_inode:")
"""Descriptors that count. Plain files do not: imports and caches open them as they like."""


def resources(server: Server) -> dict[str, int]:
    """Threads and descriptors of the server and of all that it has spawned.

    Connections to its HTTP API are left out: routers and clients keep those open as they like.
    """
    threads = descriptors = 0
    for process in _processes(server.group):
        with suppress(FileNotFoundError, ProcessLookupError):
            ignored = _sockets_of(process, server.port)
            threads += len(os.listdir(process / "task"))
            descriptors += sum(
                target.startswith(KINDS) and target not in ignored for target in _descriptors(process)
            )
    return {"threads": threads, "descriptors": descriptors}


def _processes(group: int) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            # After the name, which may hold anything but ends with the last bracket: state, parent, group.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                yield process


def _descriptors(process: Path) -> Iterator[str]:
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            yield str(link.readlink())


def _sockets_of(process: Path, port: int) -> set[str]:
    """The TCP sockets at a local port, as descriptors name them."""
    lines = (process / "net" / "tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return {f"socket:[{row[9]}]" for row in rows if int(row[1].rpartition(":")[2], 16) == port}
