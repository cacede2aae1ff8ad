"""P: sends a prompt's KV when its last chunk has run, and answers the client when D has it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sgl_pd_connector.base import BaseKVSender, KVPoll
from sgl_pd_connector.sgl_jax import compat
from sgl_pd_connector.sgl_jax.loop import DisaggregationSchedulerMixin
from sgl_pd_connector.sgl_jax.pools import PageGuard
from sgl_pd_connector.sgl_jax.requests import PDRequest
from sgl_pd_connector.sgl_jax.server_args import DisaggregationArgs

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Sending:
    """A request that P prefills for a D.

    Attributes:
        sent: its pages were given to the sender.
        answer_due: the engine has finished it; the client's answer waits for the transfer.
    """

    req: Any
    pd: PDRequest
    sender: BaseKVSender
    sent: bool = False
    answer_due: bool = False


class SchedulerDisaggregationPrefillMixin(DisaggregationSchedulerMixin):
    """Mixed in before sgl-jax's ``Scheduler`` on a prefill server.

    Such a request is an ordinary one of one token. Only three things differ: its pages are copied out when its prompt
    is complete, its answer is held until D has them, and pages that could not be copied yet are not reused.
    """

    _send_queue: dict[int, Sending]

    def _start_transfers(self, args: DisaggregationArgs) -> None:
        super()._start_transfers(args)
        self._guard = PageGuard(self.token_to_kv_pool_allocator)
        self._send_queue = self._create_send_queue()

    def _create_send_queue(self) -> dict[int, Sending]:
        """The requests between arrival and the end of their transfer, by the identity of sgl-jax's object."""
        return {}

    def _event_loop_prefill_disagg(self) -> None:
        self._run_event_loop()

    def _accept(self, req: Any) -> bool:
        pd = compat.take(req)
        if pd is None or pd.num_tokens == 0:
            return True
        sender = self.kv_manager.create_sender(pd.room, pd.prompt, pd.num_tokens)
        if reason := compat.refusal(req):
            sender.abort(f"the prefill server refused the request: {reason}")
        else:
            self._send_queue[id(req)] = Sending(req, pd, sender)
        return True

    def process_batch_result(self, batch: Any, result: Any, launch_done: Any = None) -> None:
        # Before the result: that is where a finished request gives its pages back.
        if batch.forward_mode.is_extend():
            for req in compat.batch_requests(batch):
                self._handle_completed_prefill(req)
        super().process_batch_result(batch, result, launch_done)

    def _handle_completed_prefill(self, req: Any) -> None:
        """Sends a request's pages if the forward that completes its prompt has been launched."""
        sending = self._send_queue.get(id(req))
        if sending is None or sending.sent or req.req_pool_idx is None:
            return
        if req.kv_committed_len < sending.pd.num_tokens:
            return
        sending.sent = True
        pages = compat.page_ids(self, req, sending.pd.num_tokens)
        if not sending.sender.send(pages.tolist()):
            self._guard.keep(sending.sender, pages)

    def _answerable(self, reqs: Iterable[Any]) -> Iterator[Any]:
        for req in reqs:
            sending = self._send_queue.get(id(req))
            if sending is None or not req.finished():
                yield req
            elif compat.is_aborted(req):
                self._forget(sending, "the prefill server aborted the request")
                yield req
            else:
                sending.answer_due = True

    def _poll_transfers(self) -> None:
        self._guard.sweep()
        for sending in list(self._send_queue.values()):
            state = sending.sender.poll()
            if sending.answer_due and state.is_final:
                del self._send_queue[id(sending.req)]
                if state is KVPoll.Failed:
                    self._handle_failed_send(sending)
                self._answer(sending.req)

    def _handle_failed_send(self, sending: Sending) -> None:
        """With ``recompute`` D answers the client all the same, so P's answer must not be an error to the router."""
        error = sending.sender.failure_exception()
        logger.warning("request %s was prefilled but not transferred: %s", sending.req.rid, error)
        if self.disaggregation.failure_policy == "fail":
            compat.fail(sending.req, f"KV transfer failed: {error}", HTTPStatus.BAD_GATEWAY)

    def abort_request(self, recv_req: Any) -> None:
        super().abort_request(recv_req)
        for sending in list(self._send_queue.values()):
            if compat.matches(recv_req, sending.req):
                self._forget(sending, "the client gave the request up")
                if sending.answer_due:
                    compat.fail(sending.req, "Aborted", None)
                    self._answer(sending.req)

    def _forget(self, sending: Sending, reason: str) -> None:
        sending.sender.abort(reason)
        del self._send_queue[id(sending.req)]

    def _num_transfers(self) -> int:
        return len(self._send_queue) + len(self._guard)
