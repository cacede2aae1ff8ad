"""One minute of the soak; `python -m tests.soak --minutes 10` is the long one."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import MAX_GROWTH, soak

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("fork_server")]


def test_a_minute_of_requests_failures_and_restarts() -> None:
    result = soak(minutes=1.0, seed=2)
    assert result["ended"]["ok"] > 100
    assert result["wrong_tokens"] == 0
    assert result["hangs"] == []
    assert result["failed_for_no_reason"] == []
    assert result["held_at_the_end"] == {}
    for survivor in result["survivors"].values():
        assert survivor["growth"] < MAX_GROWTH
        assert survivor["leaks"] == {}
