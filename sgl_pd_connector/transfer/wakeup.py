"""A command queue whose consumer sleeps in a ZMQ poll."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator

Command = Callable[[], None]


class CommandQueue:
    """Commands for one thread from any other, with a file descriptor that a poller can wait on.

    The lock keeps `put` from writing to a descriptor that `close` has just given back; nothing else is called under it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: deque[Command] = deque()
        self._closed = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, command: Command) -> bool:
        """Queues a command and wakes the consumer. False, and nothing happens, once closed: the consumer is gone."""
        with self._lock:
            if self._closed:
                return False
            self._commands.append(command)
            os.eventfd_write(self.fd, 1)
            return True

    def drain(self) -> Iterator[Command]:
        """Everything queued, in order. The consumer's thread only.

        What is not taken, because a command raised, stays for the next time.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._commands:
            yield self._commands.popleft()

    def close(self) -> None:
        """Closes the descriptor. Call when the consumer has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
