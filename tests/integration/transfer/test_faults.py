"""Processes die, freeze and come back: both sides end in time, nothing stays held, the next request is served."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.engine_pair import EnginePair, Moved, ToyPool, Transfer, free_port
from tests.waiting import eventually

pytestmark = pytest.mark.integration

PAGES = 40  # five chunks of eight: one more than D may hold
TOKENS = 4 * PAGES
PAGE_BYTES = 512
PULLED_BYTES = 4 * 8 * PAGE_BYTES

# Short, but far above what a busy machine needs between two messages.
DEADLINES = {
    "max_chunk_pages": 8,
    "max_pulled_bytes": PULLED_BYTES,
    "lease": 5.0,
    "peer_timeout": 3.0,
    "bootstrap_timeout": 20.0,
    "transfer_timeout": 20.0,
    "heartbeat_interval": 0.5,
    "heartbeat_ttl": 3.0,
}
IN_TIME = 15.0


@pytest.fixture
def faulty() -> Iterator[EnginePair]:
    """A pair of its own for each test; afterwards both sides are idle and serve the next request."""
    with EnginePair(p_config=DEADLINES, d_config=DEADLINES) as pair:
        yield pair

        def idle() -> bool:
            p, d = pair.p.stats(), pair.d.stats()
            held = (
                p["packed_bytes"],
                p["registered_bytes"],
                p["in_flight"],
                d["pulled_bytes"],
                d["in_flight"],
            )
            return not any(held)

        eventually(idle, "both sides idle")
        moved = pair.request(TOKENS)
        moved.finish()
        assert pair.d.digests(moved.d_pages) == pair.p.digests(moved.p_pages)


@dataclass
class Underway:
    """Three requests, in every state that two sides can be in together."""

    waiting: Moved
    """P has not prefilled it."""
    offered: Moved
    """P has, and D has not yet given it pages."""
    pulling: Moved
    """Some chunks have arrived and wait for D's engine, others are still at P."""

    @property
    def senders(self) -> list[Transfer]:
        return [self.waiting.sender, self.offered.sender, self.pulling.sender]

    @property
    def receivers(self) -> list[Transfer]:
        return [self.waiting.receiver, self.offered.receiver, self.pulling.receiver]


def underway(pair: EnginePair) -> Underway:
    waiting, offered, pulling = (pair.request(TOKENS) for _ in range(3))
    waiting.sender.wait("WaitingForInput")
    for moved in (offered, pulling):
        moved.offer()
    pair.d.stepping(False)
    pulling.receiver.receive(pulling.d_pages)
    eventually(lambda: pair.d.stats()["pulled_bytes"] == PULLED_BYTES, "all but the last chunk")
    assert pair.p.stats()["registered_bytes"] == 2 * PAGES * PAGE_BYTES
    return Underway(waiting, offered, pulling)


def test_p_is_killed(faulty: EnginePair) -> None:
    requests = underway(faulty)
    faulty.p.kill()
    requests.offered.receiver.receive(requests.offered.d_pages)
    faulty.d.stepping(True)
    for receiver in requests.receivers:
        receiver.wait("Failed", within=IN_TIME)
        assert "prefill" in receiver.error
    faulty.restart_p()


def test_d_is_killed(faulty: EnginePair) -> None:
    requests = underway(faulty)
    faulty.d.kill()
    for sender in requests.senders:
        sender.wait("Failed", within=IN_TIME)
        assert "was not heard of" in sender.error
        assert "lease = 5 s" in sender.error
    stats = faulty.p.stats()
    assert (stats["packed_bytes"], stats["registered_bytes"], stats["in_flight"]) == (0, 0, 0)
    faulty.restart_d()


def test_p_is_frozen(faulty: EnginePair) -> None:
    requests = underway(faulty)
    faulty.p.stop()
    requests.offered.receiver.receive(requests.offered.d_pages)
    faulty.d.stepping(True)
    for receiver in requests.receivers:
        receiver.wait("Failed", within=IN_TIME)
        assert "has not answered" in receiver.error
    faulty.p.resume()
    for sender in requests.senders:
        sender.wait("Failed", within=IN_TIME)


def test_d_is_frozen(faulty: EnginePair) -> None:
    requests = underway(faulty)
    faulty.d.stop()
    for sender in requests.senders:
        sender.wait("Failed", within=IN_TIME)
    faulty.d.resume()
    faulty.d.stepping(True)
    for receiver in requests.receivers:
        receiver.wait("Failed", within=IN_TIME)


def test_p_stops_in_order(faulty: EnginePair) -> None:
    requests = underway(faulty)
    faulty.p.close_manager()
    for receiver in requests.receivers:
        receiver.wait("Failed", within=IN_TIME)
        # The broken connection may be noticed before the message.
        assert "stopping" in receiver.error or receiver is requests.pulling.receiver
    for sender in requests.senders:
        assert "stopping" in sender.error
    late = faulty.p.sender("late", 10**9, b"x", 8)
    assert "stopping" in late.error
    faulty.d.stepping(True)
    faulty.p.close()
    faulty.restart_p()


def test_d_stops_in_order(faulty: EnginePair) -> None:
    requests = underway(faulty)
    faulty.d.close_manager()
    for sender in requests.senders:
        sender.wait("Failed", within=IN_TIME)
        assert "stopping" in sender.error
    for receiver in requests.receivers:
        assert "stopping" in receiver.error
    assert faulty.d.stats()["pulled_bytes"] == 0
    late = faulty.d.receiver("late", 10**9, b"x", 8, faulty.p.bootstrap)
    assert "stopping" in late.error
    faulty.d.close()
    faulty.restart_d()


def test_d_that_never_asks_costs_one_lease(faulty: EnginePair) -> None:
    sender = faulty.p.sender("nobody", 10**9, b"x", 8)
    assert sender.send([0, 1])
    assert faulty.p.stats()["packed_bytes"] == 2 * PAGE_BYTES
    assert faulty.p.stats()["registered_bytes"] == 0
    sender.wait("Failed", within=IN_TIME)
    assert "no decode instance has asked" in sender.error


@pytest.mark.parametrize("end", ["kill", "close"])
def test_p_restarts_under_its_old_name_and_address(faulty: EnginePair, end: str) -> None:
    fixed = {"instance_id": "prefill-0", "side_channel_port": free_port(), "transfer_port": free_port()}
    faulty.p.close()
    faulty.restart_p(**fixed)
    faulty.request(TOKENS).finish()
    early = faulty.d.receiver("early", 10**9 + 2, b"x", 8, faulty.p.bootstrap)
    getattr(faulty.p, end)()
    faulty.restart_p(**fixed)
    # Its successor answers under the same address and is not taken for it.
    moved = faulty.request(TOKENS)
    moved.finish()
    assert faulty.d.digests(moved.d_pages) == faulty.p.digests(moved.p_pages)
    early.abort()


def test_a_request_that_d_got_before_p_restarted_is_served_by_the_successor() -> None:
    patient = DEADLINES | {"peer_timeout": 60.0, "bootstrap_timeout": 60.0}
    with EnginePair(p_config=patient, d_config=patient) as pair:
        pair.p.kill()
        receiver = pair.d.receiver("across", 10**9 + 3, b"x", 8, pair.p.bootstrap)
        pair.restart_p()
        sender = pair.p.sender("across", 10**9 + 3, b"x", 8)
        sender.send([3, 4])
        receiver.wait("WaitingForInput")
        receiver.receive([1, 2])
        receiver.wait("Success")
        sender.wait("Success")


def test_the_bootstrap_server_restarts(faulty: EnginePair) -> None:
    assert faulty.bootstrap is not None
    faulty.bootstrap.kill()
    early = faulty.d.receiver("early", 10**9 + 4, b"x", 8, faulty.bootstrap.bootstrap)
    faulty.restart_bootstrap()
    sender = faulty.p.sender("early", 10**9 + 4, b"x", 8)
    sender.send([3, 4])
    early.wait("WaitingForInput", within=IN_TIME)
    early.receive([1, 2])
    early.wait("Success")
    sender.wait("Success")


def test_a_p_that_is_known_is_used_while_its_bootstrap_server_is_down(faulty: EnginePair) -> None:
    faulty.request(TOKENS).finish()
    assert faulty.bootstrap is not None
    faulty.bootstrap.kill()
    for _ in range(3):
        moved = faulty.request(TOKENS)
        moved.finish(within=IN_TIME)
        assert faulty.d.digests(moved.d_pages) == faulty.p.digests(moved.p_pages)
    faulty.bootstrap.close()
    faulty.restart_bootstrap()
    faulty.request(TOKENS).finish(within=IN_TIME)


def test_a_known_p_that_was_restarted_meanwhile_is_not_taken_for_the_old_one(faulty: EnginePair) -> None:
    fixed = {"instance_id": "prefill-0", "side_channel_port": free_port(), "transfer_port": free_port()}
    faulty.p.close()
    faulty.restart_p(**fixed)
    faulty.request(TOKENS).finish()
    assert faulty.bootstrap is not None
    faulty.bootstrap.kill()
    faulty.p.kill()
    faulty.restart_p(**fixed)
    moved = faulty.request(TOKENS)
    # D only knows the predecessor, and the bootstrap server alone can say what it needs of the successor.
    faulty.restart_bootstrap()
    moved.finish(within=IN_TIME)
    assert faulty.d.digests(moved.d_pages) == faulty.p.digests(moved.p_pages)


def test_nothing_grows_over_many_requests_aborts_and_peers(faulty: EnginePair) -> None:
    def storm(count: int) -> None:
        for i in range(count):
            moved = faulty.request(20)
            if i % 3 == 0:
                moved.finish()
            else:
                moved.sender.wait("WaitingForInput")
                (moved.sender if i % 3 == 1 else moved.receiver).abort()
                moved.sender.wait("Failed")
                moved.receiver.wait("Failed")

    storm(12)
    before = faulty.p.resources(), faulty.d.resources()
    storm(60)

    def at_baseline() -> bool:
        after = faulty.p.resources(), faulty.d.resources()
        return all(no_more(now, then) for now, then in zip(after, before, strict=True))

    eventually(at_baseline, f"descriptors and threads as before: {before}", 20.0)


@pytest.fixture
def heavy() -> Iterator[EnginePair]:
    """Prompts of 120 MB, of which a transfer can be stopped in the middle of a message."""
    pool = ToyPool(num_layers=16, page_size=64, token_shape=(8, 128))
    d_config = DEADLINES | {"max_pulled_bytes": 512 << 20}
    constants = {"sgl_pd_connector.transfer.decode_channel.SOCKET_IDLE": 3.0}
    with EnginePair(pool, p_config=DEADLINES, d_config=d_config, constants=constants) as pair:
        yield pair


def test_p_that_is_frozen_in_the_middle_of_a_message_does_not_freeze_d(heavy: EnginePair) -> None:
    # The native server's destructor would wait for P, holding the GIL.
    heavy.request(64 * 60).finish()
    before = heavy.d.resources()
    for delay in (0.01, 0.03, 0.05):
        moved = heavy.request(64 * 60)
        moved.pull()
        time.sleep(delay)  # anywhere in the transfer
        heavy.p.stop()
        moved.receiver.wait("Failed", "Success", within=IN_TIME)
        heavy.d.fill([0], 1)
        heavy.p.resume()
        heavy.request(64 * 60).finish()
    assert heavy.d.stats()["pulled_bytes"] == 0
    eventually(lambda: no_more(heavy.d.resources(), before), f"nothing left of the connections: {before}")


def no_more(now: dict[str, int], then: dict[str, int]) -> bool:
    return all(now[key] <= then[key] for key in then)


def test_p_that_dies_in_the_middle_of_a_message_leaves_nothing_at_d(heavy: EnginePair) -> None:
    heavy.request(64 * 60).finish()
    before = heavy.d.resources()
    moved = heavy.request(64 * 60)
    moved.pull()
    time.sleep(0.03)  # anywhere in the transfer
    heavy.p.kill()
    moved.receiver.wait("Failed", "Success", within=IN_TIME)
    heavy.restart_p()
    heavy.request(64 * 60).finish()
    eventually(lambda: no_more(heavy.d.resources(), before), f"nothing left of the connections: {before}")


def test_d_ends_like_a_program_while_p_is_frozen_in_the_middle_of_a_message(heavy: EnginePair) -> None:
    heavy.d.close()
    heavy.restart_d(spawn=True)
    moved = heavy.request(64 * 60)
    moved.pull()
    time.sleep(0.03)
    heavy.p.stop()
    assert heavy.d.close() == 0
    heavy.p.resume()
    moved.sender.wait("Failed", "Success", within=IN_TIME)
