"""A command queue whose consumer sleeps in a ZMQ poll."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

Command = Callable[[], None]


class CommandQueue:
    """Commands for one thread from any other, with a file descriptor that a poller can wait on.

    `put` never blocks; a deque's append and popleft are atomic, so there is no lock.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, command: Command) -> None:
        """Queues a command and wakes the consumer. Ignored once closed: the consumer is gone."""
        if self.fd < 0:
            return
        self._commands.append(command)
        os.eventfd_write(self.fd, 1)

    def drain(self) -> list[Command]:
        """Everything queued, in order. The consumer's thread only."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        commands = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands

    def close(self) -> None:
        """Closes the descriptor. Call when the consumer has ended."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
