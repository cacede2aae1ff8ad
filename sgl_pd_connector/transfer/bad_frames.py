"""Counts frames that were not understood, and logs them without letting a flood fill the log."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

LOG_INTERVAL = 10.0


class BadFrames:
    """One channel's."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._log_at = 0.0
        self.count = 0

    def add(self, error: Exception, sender: object) -> None:
        """One more, from ``sender``; logged unless another was a moment ago."""
        self.count += 1
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + LOG_INTERVAL
            logger.warning(
                "%s: ignoring a bad frame from %s (%d so far): %s", self._channel, sender, self.count, error
            )
