"""A manager and a scheduler without engine, device or thread. Tests say what happens next by setting states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.errors import PDError, TransferError
from sgl_pd_connector.sgl_jax.pools import Reservation
from sgl_pd_connector.sgl_jax.requests import PDRequest
from sgl_pd_connector.sgl_jax.server_args import DisaggregationArgs, parse

PAGE = 16


class FakeTransfer:
    """A sender or a receiver, in whatever state the test puts it."""

    def __init__(self, *created_with: Any) -> None:
        self.created_with = created_with
        self.state = KVPoll.Bootstrapping
        self.reason = ""
        self.pages: list[int] | None = None
        self.skipped = 0
        self.released = True

    def poll(self) -> KVPoll:
        return self.state

    def fail(self, reason: str) -> None:
        self.state, self.reason = KVPoll.Failed, reason

    def abort(self, reason: str) -> None:
        self.fail(reason)
        self.released = True

    def failure_exception(self) -> PDError:
        return TransferError(self.reason)

    def send(self, pages: list[int]) -> bool:
        self.pages = pages
        return self.released

    def receive(self, pages: list[int], skip_pages: int = 0) -> None:
        self.pages, self.skipped = pages, skip_pages
        self.state = KVPoll.Transferring


class FakeManager:
    def __init__(self) -> None:
        self.made: list[FakeTransfer] = []
        self.steps = 0
        self.closed = False

    def create_sender(self, *args: Any) -> FakeTransfer:
        return self._make(*args)

    def create_receiver(self, *args: Any, bootstrap_addr: str | None) -> FakeTransfer:
        return self._make(*args, bootstrap_addr)

    def _make(self, *args: Any) -> FakeTransfer:
        self.made.append(FakeTransfer(*args))
        return self.made[-1]

    def step(self) -> None:
        self.steps += 1

    def close(self) -> None:
        self.closed = True


class FakeRequest:
    """sgl-jax's ``Req``, as far as the mixins look at it."""

    def __init__(self, rid: str, length: int = 40, pd: PDRequest | None = None) -> None:
        self.rid = rid
        self.origin_input_ids = list(range(length))
        self.sampling_params = SimpleNamespace(max_new_tokens=8)
        self.bootstrap_host = pd
        self.return_logprob = self.return_output_logprob_only = False
        self.to_finish: Any = None
        self.finished_reason: Any = None
        self.req_pool_idx = 0
        self.kv_committed_len = 0
        self.cache_protected_len = self.cached_tokens = -1
        self.prefix_indices: Any = []

    def finished(self) -> bool:
        return self.finished_reason is not None

    def init_next_round_input(self, tree_cache: Any = None) -> None:
        """sgl-jax's own, which a held prefix replaces."""


class FakeBatch:
    def __init__(self, *reqs: FakeRequest, extend: bool = True) -> None:
        self.reqs_info = [SimpleNamespace(reqs=list(reqs), batch_is_full=False)]
        self.forward_mode = SimpleNamespace(is_extend=lambda: extend)
        self.enough_pages = True

    def is_empty(self) -> bool:
        return not self.reqs_info[0].reqs

    def filter_batch(self) -> None:
        self.reqs_info[0].reqs = [req for req in self.reqs_info[0].reqs if not req.finished()]

    def check_decode_mem(self) -> bool:
        return self.enough_pages


class FakeScheduler:
    """The methods that the mixins call and override; what they were called with is kept."""

    page_size = PAGE

    def __init__(self, *flags: str) -> None:
        self.disaggregation: DisaggregationArgs = parse(flags)[0]
        self.kv_manager: Any = FakeManager()
        self.waiting_queue: list[FakeRequest] = []
        self.running_batch = FakeBatch()
        self.chunked_reqs: list[Any] = [None]
        self.streamed: list[FakeRequest] = []
        self.next_batch: FakeBatch | None = None
        self.processed: list[FakeBatch] = []
        self.retracting: list[bool] = []
        table = (
            np.arange(100, 100 + 64 * PAGE, dtype=np.int32)[None] // PAGE * PAGE + np.arange(64 * PAGE) % PAGE
        )
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)

    def _add_request_to_queue(self, req: FakeRequest) -> None:
        self.waiting_queue.append(req)

    def _extend_requests_to_queue(self, reqs: list[FakeRequest], is_retracted: bool = False) -> None:
        self.waiting_queue += reqs
        self.retracting.append(is_retracted)

    def get_new_batch_prefill(self) -> FakeBatch | None:
        batch, self.next_batch = self.next_batch, None
        if batch is not None:
            self.waiting_queue = [req for req in self.waiting_queue if req not in batch.reqs_info[0].reqs]
        return batch

    def update_running_batch(self, batch: FakeBatch) -> FakeBatch:
        return batch

    def process_batch_result(self, batch: FakeBatch, result: Any, launch_done: Any = None) -> None:
        self.processed.append(batch)

    def abort_request(self, recv_req: Any) -> None:
        self.waiting_queue = [req for req in self.waiting_queue if not req.rid.startswith(recv_req.rid)]

    def _can_flush_cache(self) -> tuple[bool, str]:
        return True, ""

    def stream_output(self, reqs: list[FakeRequest], *_: Any, **__: Any) -> None:
        self.streamed += reqs


class FakePages:
    """`DecodePages` over a pool of so many pages, with a fixed number of leading pages held by the cache."""

    def __init__(self, free: int, cached: int = 0) -> None:
        self.free, self.cached, self.locks = free, cached, 0

    def reserve(self, req: Any, num_tokens: int, spare: int) -> Reservation | None:
        pages = -(-num_tokens // PAGE) - self.cached
        if pages * PAGE + spare > self.free * PAGE:
            return None
        self.free -= pages
        self.locks += 1
        return Reservation(np.arange(self.cached * PAGE), "node", np.arange(1000, 1000 + pages * PAGE))

    def unlock(self, reservation: Reservation) -> None:
        self.locks -= 1

    def give_back(self, reservation: Reservation) -> None:
        self.unlock(reservation)
        self.free += len(reservation.own) // PAGE

    def page_ids(self, reservation: Reservation) -> list[int]:
        return [int(location) // PAGE for location in reservation.own[::PAGE]]

    def cached_pages(self, reservation: Reservation) -> int:
        return self.cached
