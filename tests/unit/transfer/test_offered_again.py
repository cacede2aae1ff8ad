"""After a pull has failed: P offers its copy again, and D pulls all of it over a new connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import IncompatiblePeerError, TransferError
from sgl_pd_connector.transfer import pull_executor, pull_task
from sgl_pd_connector.transfer.offers import Offer
from sgl_pd_connector.transfer.plan import PullChunk
from sgl_pd_connector.transfer.pull_task import Retry
from sgl_pd_connector.wire import messages as msg
from tests.unit.transfer.fakes import wait_until
from tests.unit.transfer.interest_table import P1, D, error_of, pulling
from tests.unit.transfer.offer_table import P, asked, offered, only
from tests.unit.transfer.offer_table import packed as packed_unasked
from tests.unit.transfer.pulls import GONE, Pulls

pytestmark = pytest.mark.unit


# P.


def test_p_offers_again_under_fresh_uuids_and_takes_the_old_ones_back(p: P) -> None:
    offered(p)
    before = set(p.registered)
    ready = only(p.subscribe(again=1))
    assert isinstance(ready, msg.Ready)
    assert ready.again == 1
    assert [chunk.uuid for chunk in ready.chunks] == list(p.registered)
    assert not before & set(p.registered)
    assert p.table.registered_bytes == p.held > 0
    p.done()
    p.assert_nothing_is_held()


def test_p_offers_once_however_often_it_hears_of_the_same_failure(p: P) -> None:
    offered(p)
    again = only(p.subscribe(again=1))
    assert only(p.subscribe(again=1)) == again
    assert only(p.subscribe(again=0)) == again, "late, from before the failure"
    assert only(p.subscribe(again=2)) != again


def test_p_counts_its_own_offers_whatever_number_d_gives_them(p: P) -> None:
    offer = offered(p)
    for again in (7, 7, 9):
        p.subscribe(again=again)
    assert (offer.again, offer.retries) == (9, 2)


def test_before_the_prompt_is_prefilled_there_is_nothing_to_offer_again(p: P) -> None:
    offer = asked(p)
    assert only(p.subscribe(again=1)).known == "yes"
    assert isinstance(only(p.pack(offer)), msg.Ready)
    assert offer.retries == 0


@pytest.mark.parametrize("state", [packed_unasked, offered])
def test_a_d_whose_offer_is_gone_does_not_get_the_copy_of_another(p: P, state: Callable[[P], Offer]) -> None:
    offer = state(p)
    claimed = offer.attempt
    assert only(p.subscribe(attempt=2, again=1)).known == "no"
    assert offer.attempt == claimed


# D: what it says and hears.


def test_d_asks_until_it_hears_of_the_new_offer(d: D) -> None:
    interest = pulling(d)
    d.do(d.table.offer_again(interest, d.now))
    d.pass_time(3, (P1, "yes"))
    asked = [m for m in d.messages(msg.Subscribe) if m.again == 1]
    assert len(asked) > 2
    d.ready()
    assert interest.ready is not None
    assert interest.ready.again == 0, "late, from before the failure"
    d.ready(again=1)
    assert interest.ready.chunks[0].uuid == 2
    assert interest.life.state is KVPoll.Transferring
    assert d.endings() == []


def test_d_counts_what_was_begun_anew_not_what_it_has_asked_for(d: D) -> None:
    interest = d.want()
    assert interest.retries == 0
    d.answer_look_ups()
    d.ready()
    d.do(d.table.offer_again(interest, d.now))
    assert (interest.again, interest.retries) == (1, 0)
    d.ready(again=1)
    assert interest.retries == 1


def test_d_takes_the_new_offer_once(d: D) -> None:
    interest = pulling(d)
    d.do(d.table.offer_again(interest, d.now))
    d.ready(again=1)
    taken = interest.ready
    d.ready(again=1)
    assert interest.ready is taken


def test_a_new_offer_must_fit_too(d: D) -> None:
    interest = pulling(d)
    d.do(d.table.offer_again(interest, d.now))
    assert interest.num_tokens == 20, "as P said the first time, whatever the engine knew"
    d.refuse = IncompatiblePeerError("another prompt")
    d.ready(again=1)
    assert "another prompt" in error_of(interest)


@pytest.mark.parametrize(
    "answer",
    [
        msg.Wait(room=7, attempt=1, known="no"),
        msg.Wait(room=7, attempt=1, known="restarted"),
        msg.Failed(room=7, attempt=1, reason="lease"),
    ],
)
def test_a_p_that_has_the_offer_no_longer_ends_it_at_once(d: D, answer: msg.Message) -> None:
    interest = pulling(d)
    d.do(d.table.offer_again(interest, d.now))
    d.hear(answer)
    assert interest.life.state is KVPoll.Failed


def test_what_is_over_is_not_asked_for_again(d: D) -> None:
    interest = pulling(d)
    interest.life.fail(GONE, d.now)
    d.over(interest)
    assert d.table.offer_again(interest, d.now) == []


# D: the pull.


class Again:
    """P's answer, when a test gives it."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Sequence[PullChunk] | None = None

    def ask(self) -> None:
        self.asked += 1

    @property
    def retry(self) -> Retry:
        return Retry(self.ask, lambda: self.answer)

    def offer(self, *uuids: int) -> None:
        # Page ids stay those of the first offer.
        self.answer = [
            PullChunk(uuid, 1, np.array([place], np.int32), 0) for place, uuid in enumerate(uuids, 1)
        ]


@pytest.fixture
def again() -> Again:
    return Again()


def break_off(pulls: Pulls, uuid: int) -> None:
    for array in pulls.transport.arrays(uuid):
        array.break_off()


def test_everything_is_pulled_again_on_a_fresh_connection(
    pulls: Pulls, again: Again, caplog: pytest.LogCaptureFixture
) -> None:
    """What arrives while a connection breaks may be cut off and say nothing of it."""
    task, future = pulls.start(1, 2, 3, retry=again.retry)
    pulls.transport.arrive(1)
    break_off(pulls, 2)
    pulls.let_it_run()
    assert again.asked == 0, "another chunk is still under way on the old connection"
    pulls.transport.arrive(3)
    wait_until(lambda: again.asked)
    assert "asking it to offer the prompt again" in caplog.text
    again.offer(11, 12, 13)
    pulls.transport.arrive(11, 12, 13)
    pulls.writer.write_all(5)
    future.result(20)
    assert task.life.state is KVPoll.Success
    written = [int(write.page_ids[0]) for write in pulls.writer.carried_out]
    assert written[-3:] == [1, 2, 3], "after what was doubtful"
    assert again.asked == 1
    old, new = pulls.transport.links
    assert list(new.pulls) == [11, 12, 13]
    wait_until(lambda: old.is_cut)


def test_chunks_not_yet_asked_for_wait_for_the_new_offer(pulls: Pulls, again: Again) -> None:
    uuids = list(range(1, 8))
    _, future = pulls.start(*uuids, retry=again.retry)
    for uuid in uuids[:4]:
        break_off(pulls, uuid)
    wait_until(lambda: again.asked)
    pulls.let_it_run()
    assert not pulls.transport.started(5)
    assert pulls.budget.held == 0
    again.offer(*range(11, 18))
    pulls.transport.arrive(*range(11, 18))
    pulls.writer.write_all(7)
    future.result(20)


def test_a_second_failure_is_the_end(pulls: Pulls, again: Again) -> None:
    task, future = pulls.start(1, retry=again.retry)
    break_off(pulls, 1)
    again.offer(11)
    break_off(pulls, 11)
    with pytest.raises(TransferError, match="failed: connection reset"):
        future.result(20)
    assert again.asked == 1
    assert task.life.state is KVPoll.Failed


def test_what_hangs_on_the_broken_connection_is_not_waited_for_long(
    pulls: Pulls, again: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_executor, "DRAIN", 0.05)
    _, future = pulls.start(1, 2, retry=again.retry)
    break_off(pulls, 2)
    wait_until(lambda: again.asked)
    wait_until(lambda: pulls.transport.links[0].is_cut, "nobody else uses it")
    assert pulls.budget.held == 0
    again.offer(11, 12)
    pulls.transport.arrive(11, 12)
    pulls.writer.write_all(2)
    future.result(20)


def test_a_new_offer_is_not_waited_for_long(
    pulls: Pulls, again: Again, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_task, "OFFER_AGAIN_WITHIN", 0.05)
    _, future = pulls.start(1, retry=again.retry)
    break_off(pulls, 1)
    with pytest.raises(TransferError, match=r"failed: connection reset; it was not offered again in 0\.\d s"):
        future.result(20)
    assert pulls.budget.held == 0


def test_an_end_from_outside_is_not_held_up_by_a_retry(pulls: Pulls, again: Again) -> None:
    task, future = pulls.start(1, retry=again.retry)
    break_off(pulls, 1)
    wait_until(lambda: again.asked)
    task.life.fail(GONE, 0.0)
    assert future.exception(20) is GONE


def test_data_that_is_ready_is_not_trusted_if_its_connection_broke(pulls: Pulls, again: Again) -> None:
    task, future = pulls.start(1, 2, retry=again.retry)
    pulls.transport.arrays(2)
    pulls.transport.links[0].whole = False
    pulls.transport.arrive(1, 2)
    again.offer(11, 12)
    pulls.transport.arrive(11, 12)
    pulls.writer.write_all(3)
    future.result(20)
    assert task.life.state is KVPoll.Success
    assert list(pulls.transport.links[1].pulls) == [11, 12]


def test_without_another_offer_such_data_is_a_failure(pulls: Pulls) -> None:
    _, future = pulls.start(1)
    pulls.transport.arrays(1)
    pulls.transport.links[0].whole = False
    pulls.transport.arrive(1)
    with pytest.raises(TransferError, match="a connection broke while data was arriving"):
        future.result(20)
    assert pulls.writer.queued == []
