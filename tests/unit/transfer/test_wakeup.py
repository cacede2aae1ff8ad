"""The queue through which other threads command a channel's thread."""

from __future__ import annotations

import select

import pytest

from sgl_pd_connector.transfer.wakeup import CommandQueue

pytestmark = pytest.mark.unit


@pytest.fixture
def queue() -> CommandQueue:
    return CommandQueue()


def wakes(queue: CommandQueue) -> bool:
    return bool(select.select([queue.fd], [], [], 0)[0])


def run(queue: CommandQueue) -> None:
    for command in queue.drain():
        command()


def test_commands_wake_the_consumer_and_run_in_order(queue: CommandQueue) -> None:
    done: list[int] = []
    assert not wakes(queue)
    for i in range(3):
        queue.put(lambda i=i: done.append(i))  # type: ignore[misc]
    assert wakes(queue)
    run(queue)
    assert done == [0, 1, 2]
    assert not wakes(queue)
    queue.close()


def test_an_empty_queue_can_be_drained(queue: CommandQueue) -> None:
    run(queue)
    queue.close()


def test_a_command_that_raises_does_not_take_those_behind_it_along(queue: CommandQueue) -> None:
    done: list[str] = []
    queue.put(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    queue.put(lambda: done.append("second"))
    with pytest.raises(ZeroDivisionError):
        run(queue)
    run(queue)
    assert done == ["second"]
    queue.close()


def test_after_close_commands_are_ignored(queue: CommandQueue) -> None:
    queue.close()
    assert not queue.put(lambda: pytest.fail("run after close"))
    queue.close()
