"""Why something ended, for those who may still ask: kept for a while and in bounded number."""

from __future__ import annotations

from collections.abc import Hashable

from sgl_pd_connector.errors import PDError

MAX_KEPT = 10_000
"""Beyond it the oldest are forgotten."""


class RecentErrors[K: Hashable]:
    """Errors by what they ended. Not thread-safe: one thread's."""

    def __init__(self, keep: float) -> None:
        """
        Args:
            keep: seconds.
        """
        self._keep = keep
        self._errors: dict[K, tuple[PDError, float]] = {}  # the oldest first

    def add(self, key: K, error: PDError, now: float) -> None:
        """Replaces what is known of ``key``."""
        self.discard(key)
        self._errors[key] = error, now
        if len(self._errors) > MAX_KEPT:
            del self._errors[next(iter(self._errors))]

    def get(self, key: K) -> PDError | None:
        error, _ = self._errors.get(key, (None, 0.0))
        return error

    def discard(self, key: K) -> None:
        self._errors.pop(key, None)

    def expire(self, now: float) -> None:
        """Forgets what is too old."""
        while self._errors:
            key, (_, ended) = next(iter(self._errors.items()))
            if now - ended <= self._keep:
                return
            del self._errors[key]
