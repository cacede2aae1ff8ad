"""Waiting for a condition instead of sleeping for luck."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], what: str, within: float = 30.0) -> None:
    """Waits for ``condition``; the bound is generous because it is only reached on failure."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(0.02)
