"""A limit on bytes held, shared by all requests of one side."""

from __future__ import annotations

import threading
from collections.abc import Hashable

OVERTAKING = 5.0
"""Seconds for which younger transfers may still be served while a chunk waits for room."""


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


class Admission:
    """Who may take from a budget next: whoever fits, unless somebody has waited for too long.

    Small chunks always find room sooner than large ones, so first come, first served would leave room unused and
    serving whoever fits would leave a large chunk waiting for as long as small ones keep coming. So what waits may be
    overtaken, for `OVERTAKING` seconds; after that room is kept for the one that has waited longest.

    Only those count as waiting that hold nothing: the others are being served, or hold what they wait for themselves
    because their peer has stalled, and must not hold up anybody else. Not thread-safe: one thread's.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._waiting: dict[Hashable, float] = {}  # since when; the longest first

    def take(self, owner: Hashable, size: int, now: float, *, holds: bool) -> bool:
        """Reserves ``size`` bytes, or returns False: ask again, until `leave`.

        Args:
            owner: who asks; the oldest should ask first.
            size: bytes.
            now: the time, in seconds.
            holds: whether it has some of the budget already.
        """
        first = next(iter(self._waiting), owner)
        kept_for_first = first != owner and now - self._waiting[first] >= OVERTAKING
        if not kept_for_first and self._budget.take(size):
            self._waiting.pop(owner, None)
            return True
        if not holds:
            self._waiting.setdefault(owner, now)
        return False

    def leave(self, owner: Hashable) -> None:
        """It waits no longer. Harmless if it did not."""
        self._waiting.pop(owner, None)
