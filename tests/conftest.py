"""For all layers: no test leaves anything behind, and those that need a TPU are skipped where there is
none."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest

from sgl_pd_connector.testing.hardware import tpu_chips

# Sockets, pipes, event descriptors. Plain files are left out: imports and caches open them as they like.
_KINDS = ("socket:", "pipe:", "anon_inode:")
_PATIENCE = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if tpu_chips():
        return
    for item in items:
        if item.get_closest_marker("needs_tpu"):
            item.add_marker(pytest.mark.skip(reason="needs a TPU"))


def pytest_sessionstart() -> None:
    # multiprocessing starts this helper on first use and keeps it: no test is to be blamed for its pipe.
    resource_tracker.ensure_running()


def _descriptors() -> dict[tuple[str, str], str]:
    """Open descriptors by number and target: a number that was closed and reused counts as new."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own descriptor, or one closed meanwhile by another thread
            continue
        if target.startswith(_KINDS):
            found[number, target] = f"fd {number} -> {target}"
    return found


def _new_since(threads: set[threading.Thread], descriptors: dict[tuple[str, str], str]) -> list[str]:
    left = [f"thread {thread.name}" for thread in threading.enumerate() if thread not in threads]
    left += [name for key, name in _descriptors().items() if key not in descriptors]
    return left


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, sockets, pipes or child processes' descriptors behind.

    What fixtures of a wider scope hold was there before and is not counted. Ends that take a moment are
    waited for. A test of what keeps things for the life of the process says so: ``@pytest.mark.keeps("why")``.
    """
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    if request.node.get_closest_marker("keeps") is not None:
        return
    deadline = time.monotonic() + _PATIENCE
    while left := _new_since(threads, descriptors):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(sorted(left)))
        time.sleep(0.01)
