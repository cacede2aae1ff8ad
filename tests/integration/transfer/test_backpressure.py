"""More to send than memory: prompts wait in their pages, in order, and nothing is dropped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine_pair import EnginePair, RemoteError
from tests.waiting import eventually

pytestmark = pytest.mark.integration

PAGE_BYTES = 512
LIMIT = 20 * PAGE_BYTES


@pytest.fixture(scope="module")
def tight() -> Iterator[EnginePair]:
    """Room for twenty pages on either side."""
    chunks = {"max_chunk_pages": 8}
    with EnginePair(
        p_config=chunks | {"max_packed_bytes": LIMIT},
        d_config=chunks | {"max_pulled_bytes": LIMIT},
        own_bootstrap=False,
    ) as pair:
        yield pair


def test_above_the_budget_a_prompt_keeps_its_pages_until_there_is_room(tight: EnginePair) -> None:
    first, second, third = (tight.request(4 * 12, p_pages=range(i, i + 12)) for i in (0, 12, 24))
    assert first.sender.send(first.p_pages)
    assert not second.sender.send(second.p_pages)
    assert not third.sender.send(third.p_pages)
    assert not second.sender.released
    stats = tight.p.stats()
    assert (stats["packed_bytes"], stats["waiting_sends"]) == (12 * PAGE_BYTES, 2)
    first.finish()
    eventually(lambda: second.sender.released, "room for the second")
    assert not third.sender.released
    for moved in (second, third):
        moved.finish()
        assert tight.d.digests(moved.d_pages) == tight.p.digests(moved.p_pages)
    assert tight.p.stats()["packed_bytes"] == 0


def test_a_waiting_prompt_that_is_aborted_makes_way(tight: EnginePair) -> None:
    first, second, third = (tight.request(4 * 12, p_pages=range(i, i + 12)) for i in (0, 12, 24))
    first.sender.send(first.p_pages)
    second.sender.send(second.p_pages)
    third.sender.send(third.p_pages)
    second.sender.abort()
    second.sender.wait("Failed")
    assert second.sender.released
    first.receiver.abort()
    eventually(lambda: third.sender.released, "room for the third")
    third.finish()
    assert tight.p.stats()["waiting_sends"] == 0


def test_a_prompt_larger_than_either_budget_passes_alone(tight: EnginePair) -> None:
    moved = tight.request(4 * 40)
    assert moved.sender.send(moved.p_pages)
    moved.finish()
    assert tight.d.digests(moved.d_pages) == tight.p.digests(moved.p_pages)


def test_d_does_not_pull_more_than_it_may_hold(tight: EnginePair) -> None:
    requests = [tight.request(4 * 8, p_pages=range(8), d_pages=range(8 * i, 8 * i + 8)) for i in range(2)]
    for moved in requests:
        moved.sender.send(moved.p_pages)
        moved.receiver.wait("WaitingForInput")
    third = tight.request(4 * 4, p_pages=range(4), d_pages=range(60, 64))
    third.sender.send(third.p_pages)
    third.receiver.wait("WaitingForInput")
    tight.d.stepping(False)
    for moved in (*requests, third):
        moved.receiver.receive(moved.d_pages)
    eventually(lambda: tight.d.stats()["pulled_bytes"] == LIMIT, "a full budget")
    tight.d.stepping(True)
    for moved in (*requests, third):
        moved.receiver.wait("Success")
        moved.sender.wait("Success")
    assert tight.d.stats()["pulled_bytes"] == 0


@pytest.mark.parametrize(("pages", "text"), [(range(11), "11 pages given"), (range(13), "13 pages given")])
def test_a_wrong_number_of_pages_is_refused_and_loses_nothing(
    tight: EnginePair, pages: range, text: str
) -> None:
    moved = tight.request(4 * 12)
    with pytest.raises(RemoteError, match=text):
        moved.sender.send(pages)
    moved.finish()


@pytest.mark.parametrize("bad", [-1, 64])
def test_a_page_outside_the_pool_fails_that_request_on_both_sides(tight: EnginePair, bad: int) -> None:
    moved = tight.request(4 * 3)
    moved.sender.send([0, bad, 1])
    moved.sender.wait("Failed")
    moved.receiver.wait("Failed")
    assert "outside the pool" in moved.receiver.error
    moved = tight.request(4 * 3)
    moved.sender.send([0, 1, 2])
    moved.receiver.wait("WaitingForInput")
    moved.receiver.receive([0, bad, 1])
    moved.receiver.wait("Failed")
    assert "outside the pool" in moved.receiver.error
    moved.sender.wait("Failed")
    tight.request(4 * 3).finish()
    assert (tight.p.stats()["packed_bytes"], tight.d.stats()["pulled_bytes"]) == (0, 0)


def test_a_wrong_number_of_pages_on_d_is_refused_and_loses_nothing(tight: EnginePair) -> None:
    moved = tight.request(4 * 3)
    moved.sender.send(moved.p_pages)
    moved.receiver.wait("WaitingForInput")
    with pytest.raises(RemoteError, match="0 skipped and 2 given pages do not make the 3"):
        moved.receiver.receive([0, 1])
    moved.finish()
