"""The threads of P and D with switches at random lines of the package: no order of theirs loses or repeats anything."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import pytest

import sgl_pd_connector
from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.config import load_config
from sgl_pd_connector.transfer.manager import JaxTransferKVManager
from sgl_pd_connector.transfer.pool import kv_args
from sgl_pd_connector.wire.rooms import prompt_digest
from tests.support.engine_pair import ToyPool
from tests.support.engine_process import ToyRunner
from tests.waiting import eventually

pytestmark = pytest.mark.integration

POOL = ToyPool()
PACKAGE = os.path.dirname(sgl_pd_connector.__file__)
REQUESTS = 150
PAGES = 4
HANG = 120.0


@contextlib.contextmanager
def random_switches(seed: int) -> Iterator[None]:
    """Threads started within give way at random lines of the package; the interpreter switches as often as it can."""
    generator = random.Random(seed)

    def line(_frame: FrameType, _event: str, _argument: Any) -> Any:
        if generator.random() < 0.05:
            time.sleep(0)
        return line

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threading.settrace(call)
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        sys.setswitchinterval(interval)


class Side:
    """A manager and the engine around it."""

    def __init__(self, role: Any, seed: int | None, bootstrap: str | None) -> None:
        config = load_config({"bootstrap_port": 0, "max_chunk_pages": 2}, where="test", environ={})
        self.runner = ToyRunner(vars(POOL), seed)
        args = kv_args(self.runner.get_pools(), POOL.page_size)
        self.manager = JaxTransferKVManager(args, bootstrap, role=role, config=config)
        self.manager.register_runner(self.runner)

    def step(self) -> None:
        self.runner.forward()
        self.manager.step()


@pytest.mark.parametrize("seed", range(3))
def test_requests_and_aborts_from_both_sides_at_any_moment(seed: int) -> None:
    # In a process of its own: native servers end with theirs.
    process = multiprocessing.get_context("forkserver").Process(target=race, args=(seed,))
    process.start()
    process.join(2 * HANG)
    if process.exitcode is None:
        process.kill()
        process.join()
    status = process.exitcode
    process.close()
    assert status == 0, "see the traceback above"


def race(seed: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    try:
        with random_switches(seed), contextlib.ExitStack() as stack:
            p = Side("prefill", 1, None)
            stack.callback(p.manager.close)
            d = Side("decode", None, p.manager.bootstrap_addr)
            stack.callback(d.manager.close)
            run(p, d, random.Random(seed))
    except BaseException:  # noqa: BLE001 - told by the exit status
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run(p: Side, d: Side, choose: random.Random) -> None:
    expected = p.runner.digests(list(range(POOL.num_pages)))
    free = [list(range(first, first + PAGES)) for first in range(0, POOL.num_pages, PAGES)]
    running: list[Any] = []
    started, right = 0, 0
    deadline = time.monotonic() + HANG
    while started < REQUESTS or running:
        assert time.monotonic() < deadline, [(s.poll(), r.poll()) for s, r, *_ in running]
        while started < REQUESTS and free:
            started += 1
            prompt, tokens = prompt_digest([started]), PAGES * POOL.page_size
            sender = p.manager.create_sender(started, prompt, tokens)
            receiver = d.manager.create_receiver(started, prompt, tokens)
            sender.send(p_pages := choose.sample(range(POOL.num_pages), PAGES))
            running.append((sender, receiver, p_pages, free.pop()))
        for request in list(running):
            sender, receiver, p_pages, d_pages = request
            if choose.random() < 0.01:
                choose.choice((sender, receiver)).abort("at any moment")
            if receiver.poll() is KVPoll.WaitingForInput:
                receiver.receive(d_pages)
            if sender.poll().is_final and receiver.poll().is_final:
                if receiver.poll() is KVPoll.Success:
                    right += 1
                    assert d.runner.digests(d_pages) == [expected[page] for page in p_pages]
                running.remove(request)
                free.append(d_pages)
        p.step()
        d.step()
    assert right > 0
    for side in (p, d):
        eventually(lambda side=side: held(side) == [], "everything given back", HANG)  # type: ignore[misc]
        rooms = [record.room for record in side.manager.take_records()]
        assert sorted(rooms) == list(range(1, REQUESTS + 1)), "every request is reported once"


def held(side: Side) -> list[str]:
    gauges = ("in_flight", "packed_bytes", "registered_bytes", "waiting_sends", "pulled_bytes")
    return [name for name in gauges if getattr(side.manager.stats(), name)]
