"""One pair of processes for the tests that break nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine_pair import EnginePair


@pytest.fixture(scope="module")
def pair() -> Iterator[EnginePair]:
    with EnginePair(p_config={"max_chunk_pages": 8}, d_config={"max_chunk_pages": 8}) as pair:
        yield pair
