"""One pair of processes for the tests that break nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine_pair import EnginePair


@pytest.fixture(scope="session", autouse=True)
def _processes(fork_server: None) -> None:
    """Every test here starts some."""


@pytest.fixture(scope="module")
def pair() -> Iterator[EnginePair]:
    chunks = {"max_chunk_pages": 8}
    # D's budget is four chunks, so that of a long prompt some can be kept from leaving P.
    with EnginePair(p_config=chunks, d_config=chunks | {"max_pulled_bytes": 4 * 8 * 512}) as pair:
        yield pair
