"""A limit on bytes held, shared by all requests of one side."""

from __future__ import annotations

import threading


class ByteBudget:
    """Counts bytes against a limit. What does not fit waits; nothing is dropped.

    A single item larger than the whole limit is let through when nothing else is held, so it waits but never starves.
    The lock is a leaf: nothing else is locked or called while it is held.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._held

    def take(self, size: int) -> bool:
        """Reserves ``size`` bytes, or returns False."""
        with self._lock:
            if self._held and self._held + size > self.limit:
                return False
            self._held += size
            return True

    def give(self, size: int) -> None:
        """Returns ``size`` bytes taken before."""
        with self._lock:
            if size > self._held:
                raise AssertionError(f"returning {size} bytes to a budget that holds {self._held}")
            self._held -= size
