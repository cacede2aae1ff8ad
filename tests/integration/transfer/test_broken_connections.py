"""The native transfer's connections break while both sides live: the prompt is pulled again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.engine_pair import EnginePair, Moved, ToyPool, free_port
from tests.waiting import eventually

pytestmark = pytest.mark.integration


class Breakable(EnginePair):
    """A pair whose transfers can be cut off."""

    def __init__(self, pool: ToyPool, **d_config: int) -> None:
        self.side_channel_port = free_port()
        chunks = {"max_chunk_pages": 8}
        super().__init__(pool, chunks | {"side_channel_port": self.side_channel_port}, chunks | d_config)

    def cut_transfers(self) -> None:
        assert self.p.cut_transfers([self.side_channel_port]) > 0

    def pulling(self, num_tokens: int) -> Moved:
        moved = self.request(num_tokens)
        self.d.fill(moved.d_pages, 0)  # all requests here move the same bytes
        moved.pull()
        return moved

    def assert_moved(self, moved: Moved) -> None:
        moved.finish()
        assert self.d.digests(moved.d_pages) == self.p.digests(moved.p_pages)
        held = ("packed_bytes", "registered_bytes", "pulled_bytes", "in_flight")
        eventually(
            lambda: not any(process.stats()[name] for process in (self.p, self.d) for name in held),
            "nothing held",
        )


@pytest.fixture
def small() -> Iterator[Breakable]:
    """D may hold four of a prompt's five chunks."""
    with Breakable(ToyPool(), max_pulled_bytes=4 * 8 * 512) as pair:
        yield pair


@pytest.fixture
def heavy() -> Iterator[Breakable]:
    """Prompts of 120 MB, of which a transfer can be cut anywhere."""
    with Breakable(ToyPool(num_layers=16, page_size=64, token_shape=(8, 128))) as pair:
        yield pair


def test_between_two_chunks(small: Breakable) -> None:
    small.d.stepping(False)
    moved = small.pulling(160)
    eventually(lambda: small.d.stats()["pulled_bytes"] == 4 * 8 * 512, "all but the last chunk")
    small.cut_transfers()
    small.d.stepping(True)
    small.assert_moved(moved)
    records = [*small.p.records(), *small.d.records()]
    assert [(record["outcome"], record["retries"]) for record in records] == [("ok", 1), ("ok", 1)]


def test_in_the_middle_of_a_chunk(heavy: Breakable) -> None:
    heavy.assert_moved(heavy.pulling(64 * 60))
    for delay in (0.0, 0.01, 0.03, 0.05):
        moved = heavy.pulling(64 * 60)
        time.sleep(delay)  # anywhere in the transfer
        heavy.cut_transfers()
        heavy.assert_moved(moved)


def test_several_transfers_that_break_together(small: Breakable) -> None:
    small.assert_moved(small.pulling(160))
    several = [small.request(80, d_pages=range(20 * i, 20 * (i + 1))) for i in range(3)]
    for moved in several:
        moved.offer()
    small.d.stepping(False)
    for moved in several:
        moved.receiver.receive(moved.d_pages)
    # Of the chunks of 8, 8 and 4 pages: all of the first request and one of the second.
    eventually(lambda: small.d.stats()["pulled_bytes"] == 28 * 512, "as much as D may hold")
    small.cut_transfers()
    small.d.stepping(True)
    for moved in several:
        moved.finish()
        assert small.d.digests(moved.d_pages) == small.p.digests(moved.p_pages)


def test_a_p_that_is_gone_costs_a_moment(small: Breakable) -> None:
    small.d.stepping(False)
    moved = small.pulling(160)
    eventually(lambda: small.d.stats()["pulled_bytes"] == 4 * 8 * 512, "all but the last chunk")
    small.p.kill()
    small.d.stepping(True)
    moved.receiver.wait("Failed", within=8.0)  # peer_timeout is 10 s
    assert "it was not offered again in" in moved.receiver.error
    assert [record["retries"] for record in small.d.records()] == [0], "asked for is not begun anew"
