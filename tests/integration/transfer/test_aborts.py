"""Either side gives up, in every state: its pages are free at once, the other side hears why, nothing stays held."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.engine_pair import EnginePair, Moved
from tests.waiting import eventually

pytestmark = pytest.mark.integration

PAGES = 40  # five chunks of eight: one more than D may hold
TOKENS = 4 * PAGES
PAGE_BYTES = 512


@pytest.fixture(autouse=True)
def nothing_is_left(pair: EnginePair) -> Iterator[None]:
    """After each of these tests both sides are idle, and the next request is served."""
    yield
    pair.d.stepping(True)

    def idle() -> bool:
        p, d = pair.p.stats(), pair.d.stats()
        return not any(
            (p["packed_bytes"], p["registered_bytes"], p["in_flight"], d["pulled_bytes"], d["in_flight"])
        )

    eventually(idle, "both sides idle")
    pair.p.records()
    pair.d.records()
    pair.request(20).finish()
    assert [record["outcome"] for record in (*pair.p.records(), *pair.d.records())] == ["ok", "ok"]


def bootstrapping(pair: EnginePair) -> Moved:
    moved = pair.request(TOKENS)
    moved.sender.wait("WaitingForInput")
    return moved


def prefilled(pair: EnginePair) -> Moved:
    moved = bootstrapping(pair)
    moved.offer()
    return moved


def mid_pull(pair: EnginePair) -> Moved:
    """Some chunks have arrived and wait for D's engine, others are still at P."""
    moved = prefilled(pair)
    pair.d.stepping(False)
    moved.receiver.receive(moved.d_pages)
    assert moved.receiver.state == "Transferring"
    eventually(lambda: pair.d.stats()["pulled_bytes"] == 4 * 8 * PAGE_BYTES, "all but the last chunk")
    return moved


STATES = [bootstrapping, prefilled, mid_pull]
in_every_state = pytest.mark.parametrize("state", STATES)


@in_every_state
def test_d_gives_up_and_p_is_told_at_once(pair: EnginePair, state: Callable[[EnginePair], Moved]) -> None:
    moved = state(pair)
    moved.receiver.abort("client gone")
    assert moved.receiver.state == "Failed"
    assert "client gone" in moved.receiver.error
    moved.sender.wait("Failed")
    assert "gave up: client gone" in moved.sender.error
    assert moved.sender.released


@in_every_state
def test_p_gives_up_and_d_is_told_at_once(pair: EnginePair, state: Callable[[EnginePair], Moved]) -> None:
    moved = state(pair)
    moved.sender.abort("preempted")
    moved.sender.wait("Failed")
    assert "preempted (transfer with decode instance" in moved.sender.error
    assert moved.sender.released
    moved.receiver.wait("Failed")
    # Mid-pull the broken connection may be noticed before the message.
    assert "preempted" in moved.receiver.error or state is mid_pull


def test_after_an_abort_no_page_is_written(pair: EnginePair) -> None:
    moved = mid_pull(pair)
    moved.receiver.abort("client gone")
    pair.d.fill(moved.d_pages, 1)  # the next request's
    before = pair.d.digests(moved.d_pages)
    pair.d.stepping(True)
    moved.sender.wait("Failed")
    pair.request(20, d_pages=[60, 61, 62, 63, 59]).finish()
    assert pair.d.digests(moved.d_pages)[5:] == before[5:]


def test_after_p_gave_up_no_page_is_written(pair: EnginePair) -> None:
    moved = mid_pull(pair)
    before = pair.d.digests(moved.d_pages)
    moved.sender.abort("preempted")
    moved.receiver.wait("Failed")
    pair.d.stepping(True)
    pair.request(4, d_pages=[0]).finish()
    assert pair.d.digests(moved.d_pages) == before


def test_one_abort_does_not_touch_the_transfers_beside_it(pair: EnginePair) -> None:
    other = pair.request(TOKENS, d_pages=range(PAGES))
    other.offer()
    moved = mid_pull(pair)
    other.receiver.receive(other.d_pages)
    moved.sender.abort("preempted")
    moved.receiver.wait("Failed")
    pair.d.stepping(True)
    other.receiver.wait("Success")
    assert pair.d.digests(other.d_pages) == pair.p.digests(other.p_pages)


def test_a_request_that_p_refused_before_d_came_fails_at_once(pair: EnginePair) -> None:
    sender = pair.p.sender("refused", 10**9 + 5, b"x", 8)
    sender.abort("prompt is too long")
    sender.wait("Failed")
    receiver = pair.d.receiver("refused", 10**9 + 5, b"x", 8, pair.p.bootstrap)
    receiver.wait("Failed", within=5)
    assert "prompt is too long" in receiver.error


def test_d_gives_up_before_p_has_the_request_and_p_hears_of_it(pair: EnginePair) -> None:
    receiver = pair.d.receiver("early", 10**9 + 6, b"x", 8, pair.p.bootstrap)
    receiver.abort("client gone")
    sender = pair.p.sender("early", 10**9 + 6, b"x", 8)
    sender.wait("Failed")
    assert "gave up: client gone" in sender.error


def test_a_request_that_ds_server_refused_is_dropped_by_p(pair: EnginePair) -> None:
    sender = pair.p.sender("refused by D", 10**9 + 7, b"x", 8)
    assert sender.send([0, 1])
    pair.d.refuse(10**9 + 7, pair.p.bootstrap)
    sender.wait("Failed", within=5)
    assert "gave up: too long" in sender.error


def test_what_is_over_cannot_be_aborted(pair: EnginePair) -> None:
    moved = pair.request(20)
    moved.finish()
    moved.sender.abort()
    moved.receiver.abort()
    assert (moved.sender.state, moved.receiver.state) == ("Success", "Success")


def test_a_second_abort_changes_nothing(pair: EnginePair) -> None:
    moved = bootstrapping(pair)
    moved.receiver.abort("first")
    moved.receiver.abort("second")
    assert "first" in moved.receiver.error


@pytest.mark.parametrize("p_tokens", [8, 200])
def test_sides_that_disagree_on_the_length_both_fail(pair: EnginePair, p_tokens: int) -> None:
    sender = pair.p.sender(f"length{p_tokens}", 10**9 + p_tokens, b"x", p_tokens)
    receiver = pair.d.receiver(f"length{p_tokens}", 10**9 + p_tokens, b"x", 12, pair.p.bootstrap)
    sender.send(range(pair.pool.pages(p_tokens)))
    receiver.wait("Failed")
    assert f"has {p_tokens} tokens of a prompt of 12" in receiver.error
    sender.wait("Failed")
    assert f"has {p_tokens} tokens of a prompt of 12" in sender.error
