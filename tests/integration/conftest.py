"""Fixtures of several directories."""

from __future__ import annotations

import pytest

from tests.support.engine_pair import start_fork_server


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Before any test that is watched for what it leaves behind: the server stays."""
    start_fork_server()
