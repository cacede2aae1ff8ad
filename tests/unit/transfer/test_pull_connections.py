"""The pull thread's connections from one transfer to the next: how long they are kept, and what ends them."""

from __future__ import annotations

import pytest

from sgl_pd_connector.errors import TransferError
from sgl_pd_connector.transfer import links, pull_executor
from tests.unit.transfer.fakes import FakeLink, wait_until
from tests.unit.transfer.pulls import P2, Pulls

pytestmark = pytest.mark.unit


def used(pulls: Pulls) -> FakeLink:
    """The connection, after a transfer over it."""
    pulls.move(1)
    [link] = pulls.transport.links
    return link


def test_a_connection_that_nobody_used_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, pulls: Pulls
) -> None:
    monkeypatch.setattr(links, "LINK_IDLE", 0.2)
    monkeypatch.setattr(pull_executor, "IDLE_CHECK", 0.05)
    first = used(pulls)
    wait_until(lambda: first.is_cut, "the idle connection dropped")
    pulls.move(2)
    assert len(pulls.transport.links) == 2


def test_a_connection_that_the_peer_has_left_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch, pulls: Pulls
) -> None:
    monkeypatch.setattr(pull_executor, "IDLE_CHECK", 0.05)
    link = used(pulls)
    pulls.let_it_run()
    assert not link.is_cut
    link.whole = False
    wait_until(lambda: link.is_cut, "the dead connection dropped")


def test_a_connection_in_use_is_not_idle_however_slow_it_is(
    monkeypatch: pytest.MonkeyPatch, pulls: Pulls
) -> None:
    monkeypatch.setattr(links, "LINK_IDLE", 0.1)
    monkeypatch.setattr(pull_executor, "IDLE_CHECK", 0.05)
    _, slow = pulls.start(1)
    pulls.transport.arrays(1)
    for uuid in (2, 3):
        pulls.move(uuid, peer=P2)
        wait_until(lambda: pulls.transport.links[-1].is_cut, "the other connection, which is idle, dropped")
    assert not pulls.transport.links[0].is_cut
    pulls.finish(slow, [1])


def test_a_connection_that_cannot_be_looked_at_costs_its_transfer_only(pulls: Pulls) -> None:
    _, future = pulls.start(1)
    pulls.transport.arrays(1)
    [link] = pulls.transport.links
    link.unlookable = OSError("too many open files")
    pulls.transport.arrive(1)
    with pytest.raises(TransferError, match="too many open files"):
        future.result(20)
    assert pulls.budget.held == 0
    pulls.move(2)


def test_an_error_that_nobody_foresaw_does_not_end_the_pulling(
    monkeypatch: pytest.MonkeyPatch, pulls: Pulls, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pull_executor, "IDLE_CHECK", 0.02)
    monkeypatch.setattr(pull_executor, "AFTER_ERROR", 0.01)
    link = used(pulls)
    link.unlookable = OSError("too many open files")
    wait_until(lambda: "pulling: unexpected error; going on" in caplog.text)
    link.unlookable = None
    pulls.move(2)
