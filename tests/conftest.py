"""For all layers: tests marked ``needs_tpu`` are skipped, with that reason, where there is no TPU."""

from __future__ import annotations

import glob

import pytest


def has_tpu() -> bool:
    """Whether the kernel shows a TPU, without starting JAX on it."""
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if has_tpu():
        return
    for item in items:
        if item.get_closest_marker("needs_tpu"):
            item.add_marker(pytest.mark.skip(reason="needs a TPU"))
