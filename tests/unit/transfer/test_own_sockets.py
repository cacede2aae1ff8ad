from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from sgl_pd_connector.transfer.own_sockets import Remote, listening_ports

pytestmark = pytest.mark.unit


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listen(stack: ExitStack) -> int:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port: int = listener.getsockname()[1]
    return port


def connect(stack: ExitStack, port: int) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port)))


def is_open(sock: socket.socket) -> bool:
    try:
        sock.send(b"x")
    except OSError:
        return False
    return True


def test_ports_on_which_this_process_listens(stack: ExitStack) -> None:
    ports = {listen(stack), listen(stack)}
    connect(stack, min(ports))
    assert ports <= listening_ports()


def test_connections_that_were_there_before_and_that_come_after_are_left_alone(stack: ExitStack) -> None:
    control, data, unrelated = listen(stack), listen(stack), listen(stack)
    remote = Remote("127.0.0.1", frozenset({control, data}))
    earlier = connect(stack, control)
    of_others = remote.connections()
    own = [connect(stack, control), connect(stack, data), connect(stack, data)]
    elsewhere = connect(stack, unrelated)
    inodes = remote.connections() - of_others
    later = connect(stack, data)
    assert remote.hang_up(inodes) == len(own)
    assert [is_open(sock) for sock in own] == [False] * len(own)
    assert [is_open(sock) for sock in (earlier, elsewhere, later)] == [True] * 3


def test_what_has_ended_meanwhile_is_no_error(stack: ExitStack) -> None:
    port = listen(stack)
    remote = Remote("127.0.0.1", frozenset({port}))
    own = connect(stack, port)
    inodes = remote.connections()
    own.close()
    successor = connect(stack, port)
    assert remote.hang_up(inodes) == 0
    assert is_open(successor)


def test_an_address_is_the_same_in_both_families(stack: ExitStack) -> None:
    port = listen(stack)
    sock = stack.enter_context(socket.socket(socket.AF_INET6))
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.connect(("::ffff:127.0.0.1", port))
    assert len(Remote("127.0.0.1", frozenset({port})).connections()) == 1
    assert not Remote("127.0.0.2", frozenset({port})).connections()


@pytest.mark.parametrize("end", ["closed here", "closed there", "reset there", "shut down there"])
def test_a_connection_is_established_until_either_end_lets_go(stack: ExitStack, end: str) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    own = connect(stack, listener.getsockname()[1])
    theirs, _ = listener.accept()
    stack.enter_context(theirs)
    [descriptor] = Remote("127.0.0.1", frozenset({listener.getsockname()[1]})).descriptors()
    assert descriptor.is_established()
    own.send(b"x")
    if end == "closed here":
        own.close()
    elif end == "shut down there":
        theirs.shutdown(socket.SHUT_WR)
    else:
        if end == "closed there":
            theirs.recv(1)  # with unread data a close is a reset
        theirs.close()
    assert not descriptor.is_established()


def test_the_number_of_a_closed_connection_may_be_anothers(stack: ExitStack) -> None:
    port = listen(stack)
    own = connect(stack, port)
    [descriptor] = Remote("127.0.0.1", frozenset({port})).descriptors()
    number = own.fileno()
    own.close()
    successor = connect(stack, port)
    assert successor.fileno() == number
    assert not descriptor.is_established()
