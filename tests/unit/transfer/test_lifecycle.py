"""The life of one side of a transfer, driven by several threads."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator

import pytest

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import IllegalTransitionError, TransferAbortedError, TransferError
from sgl_pd_connector.transfer.lifecycle import Lifecycle

pytestmark = pytest.mark.unit

ORDER = [KVPoll.Bootstrapping, KVPoll.WaitingForInput, KVPoll.Transferring, KVPoll.Success]
GONE = TransferAbortedError("client gone")


def life_in(state: KVPoll) -> Lifecycle:
    life = Lifecycle(0.0)
    if state is KVPoll.Failed:
        life.fail(GONE, 0.0)
    else:
        for step in ORDER[1 : ORDER.index(state) + 1]:
            life.advance(step, 0.0)
    return life


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Makes threads interleave at almost every bytecode."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_whole_life_with_the_time_of_every_state() -> None:
    life = Lifecycle(1.0)
    assert life.state is KVPoll.Bootstrapping
    for now, state in enumerate(ORDER[1:], start=2):
        assert life.advance(state, float(now))
        assert life.state is state
        assert life.age(now + 0.5) == 0.5
    assert life.is_final
    assert life.entered == dict(zip(ORDER, (1.0, 2.0, 3.0, 4.0), strict=True))


@pytest.mark.parametrize(("start", "to"), list(itertools.product(ORDER, KVPoll)))
def test_a_step_that_does_not_follow_is_an_error_and_changes_nothing(start: KVPoll, to: KVPoll) -> None:
    life = life_in(start)
    if to is KVPoll.Failed or (start is not KVPoll.Success and to == start + 1):
        return
    with pytest.raises(IllegalTransitionError, match=f"{start.name} -> {to.name}"):
        life.advance(to, 1.0)
    assert life.state is start
    assert to not in life.entered or life.entered[to] == 0.0


@pytest.mark.parametrize("state", ORDER[:3])
def test_any_unfinished_life_can_fail_and_says_why(state: KVPoll) -> None:
    life = life_in(state)
    assert life.fail(GONE, 5.0)
    assert life.state is KVPoll.Failed
    assert life.failure_exception() is GONE
    assert life.entered[KVPoll.Failed] == 5.0


@pytest.mark.parametrize("state", [KVPoll.Success, KVPoll.Failed])
def test_what_is_over_cannot_fail_again(state: KVPoll) -> None:
    life = life_in(state)
    before = life.error
    assert not life.fail(TransferError("too late"), 5.0)
    assert (life.state, life.error) == (state, before)


@pytest.mark.parametrize("to", KVPoll)
def test_whoever_advances_a_failed_life_is_told_that_it_is_over(to: KVPoll) -> None:
    life = life_in(KVPoll.Failed)
    assert not life.advance(to, 1.0)
    assert life.failure_exception() is GONE


@pytest.mark.parametrize("state", ORDER)
def test_without_failure_there_is_no_error(state: KVPoll) -> None:
    life = life_in(state)
    assert life.error is None
    with pytest.raises(RuntimeError, match=state.name):
        life.failure_exception()


@pytest.mark.usefixtures("frequent_switches")
def test_of_several_threads_that_end_a_life_exactly_one_wins() -> None:
    for _ in range(50):
        life = life_in(KVPoll.Transferring)
        errors = [TransferError(str(i)) for i in range(3)]
        start = threading.Barrier(4)
        won: list[object] = []

        def fail(error: TransferError, life=life, start=start, won=won) -> None:  # type: ignore[no-untyped-def]
            start.wait()
            if life.fail(error, 1.0):
                won.append(error)

        def succeed(life=life, start=start, won=won) -> None:  # type: ignore[no-untyped-def]
            start.wait()
            try:
                if life.advance(KVPoll.Success, 1.0):
                    won.append(None)
            except IllegalTransitionError:
                raise AssertionError("a failed life is no illegal transition") from None

        threads = [threading.Thread(target=fail, args=(error,)) for error in errors]
        threads.append(threading.Thread(target=succeed))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won == [life.error]
