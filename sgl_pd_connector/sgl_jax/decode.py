"""D: receives a prompt's KV into pages of its own, then lets the request run from there."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sgl_pd_connector.base import KVPoll
from sgl_pd_connector.sgl_jax import compat
from sgl_pd_connector.sgl_jax.loop import DisaggregationSchedulerMixin
from sgl_pd_connector.sgl_jax.pools import DecodePages, Reservation
from sgl_pd_connector.sgl_jax.requests import PDRequest
from sgl_pd_connector.sgl_jax.server_args import PREFIX, DisaggregationArgs
from sgl_pd_connector.transfer import JaxTransferKVReceiver

logger = logging.getLogger(__name__)

MAX_NEW_TOKENS_ESTIMATE = 4096
"""sgl-jax admits a request when its prompt and so many new tokens fit (``CLIP_MAX_NEW_TOKENS_ESTIMATION``)."""


@dataclass(eq=False)
class Receiving:
    """A request whose prompt is, or was, received.

    Attributes:
        reservation: where to; None until P is ready and there is room.
    """

    req: Any
    pd: PDRequest
    receiver: JaxTransferKVReceiver
    reservation: Reservation | None = None


class SchedulerDisaggregationDecodeMixin(DisaggregationSchedulerMixin):
    """Mixed in before sgl-jax's ``Scheduler`` on a decode server.

    A request waits in `_recv_queue` until its KV is written, then joins sgl-jax's waiting queue with that KV as its
    prefix, and the ordinary extend of what is left, one token, samples its first token. Until it is admitted its pages
    are in `_received`: nobody else accounts for them.
    """

    _recv_queue: list[Receiving]

    def _start_transfers(self, args: DisaggregationArgs) -> None:
        super()._start_transfers(args)
        self._pages = DecodePages(self)
        self._received: dict[int, Receiving] = {}
        self._recv_queue = self._create_recv_queue()

    def _create_recv_queue(self) -> list[Receiving]:
        """The requests whose KV is not here yet, in order of arrival."""
        return []

    def _event_loop_decode_disagg(self) -> None:
        self._run_event_loop()

    def _accept(self, req: Any) -> bool:
        pd = compat.take(req)
        if pd is None or pd.num_tokens == 0:
            return True
        receiver = self.kv_manager.create_receiver(
            pd.room, pd.prompt, pd.num_tokens, bootstrap_addr=pd.bootstrap_addr
        )
        if reason := compat.refusal(req):
            receiver.abort(f"the decode server refused the request: {reason}")
            return True
        self._recv_queue.append(Receiving(req, pd, receiver))
        return False

    def _poll_transfers(self) -> None:
        room = True
        for receiving in list(self._recv_queue):
            match receiving.receiver.poll():
                case KVPoll.WaitingForInput if room and receiving.reservation is None:
                    # In order of arrival: a large prompt is not starved by small ones.
                    room = self._start_pull(receiving)
                case KVPoll.Success:
                    self._recv_queue.remove(receiving)
                    self._handle_recv_complete(receiving)
                case KVPoll.Failed:
                    self._recv_queue.remove(receiving)
                    self._handle_recv_failed(receiving)

    def _start_pull(self, receiving: Receiving) -> bool:
        """Reserves pages and starts the pull. False: there is no room now."""
        req, num_tokens = receiving.req, receiving.pd.num_tokens
        rest = len(req.origin_input_ids) - num_tokens
        spare = rest + min(req.sampling_params.max_new_tokens, MAX_NEW_TOKENS_ESTIMATE)
        reservation = self._pages.reserve(req, num_tokens, spare)
        if reservation is None and not self._has_other_work():
            # It would not fit beside its own decoding even when everything else is gone: let sgl-jax handle it.
            reservation = self._pages.reserve(req, num_tokens, 0)
        if reservation is None:
            return False
        receiving.reservation = reservation
        receiving.receiver.receive(self._pages.page_ids(reservation), self._pages.cached_pages(reservation))
        return True

    def _has_other_work(self) -> bool:
        busy = self._pulls() or self._received or self.waiting_queue
        return bool(busy) or not self.running_batch.is_empty()

    def _pulls(self) -> bool:
        """Whether pages are being written that will be free, or a request's, in a while."""
        return any(receiving.reservation is not None for receiving in self._recv_queue)

    def _handle_recv_complete(self, receiving: Receiving) -> None:
        """The prompt's KV is in the pool: the request may run."""
        assert receiving.reservation is not None
        req, reservation = receiving.req, receiving.reservation
        compat.hold_prefix(req, reservation.locations(receiving.pd.num_tokens), reservation.node)
        self._received[id(req)] = receiving
        super()._add_request_to_queue(req)

    def _handle_recv_failed(self, receiving: Receiving) -> None:
        """Recomputes or answers with an error, as ``--disaggregation-failure-policy`` says."""
        error = receiving.receiver.failure_exception()
        req = receiving.req
        if receiving.reservation is not None:
            self._pages.give_back(receiving.reservation)
        if self.disaggregation.failure_policy == "recompute":
            logger.warning("request %s: prefilled here, because its KV transfer failed: %s", req.rid, error)
            super()._add_request_to_queue(req)
        else:
            logger.error(
                "request %s fails: KV transfer failed: %s (%sfailure-policy recompute would prefill it here)",
                req.rid,
                error,
                PREFIX,
            )
            compat.fail(req, f"KV transfer failed: {error}", HTTPStatus.BAD_GATEWAY)
            self._answer(req)

    def get_new_batch_prefill(self) -> Any:
        batch = super().get_new_batch_prefill()
        if batch is not None:
            for req in compat.batch_requests(batch):
                if receiving := self._received.pop(id(req), None):
                    self._settle(receiving)
        elif (
            self._received
            and self.running_batch.is_empty()
            and not any(self.chunked_reqs)
            and not self._pulls()
        ):
            # Nothing runs and nothing can be admitted: received prompts stand in each other's way.
            self._recompute_newest()
        return batch

    def _settle(self, receiving: Receiving) -> None:
        assert receiving.reservation is not None
        compat.settle_prefix(receiving.req, len(receiving.reservation.cached))
        self._pages.unlock(receiving.reservation)

    def update_running_batch(self, batch: Any) -> Any:
        # Before sgl-jax retracts a running request for want of pages, those that only wait give theirs back.
        if self._received:
            batch.filter_batch()
            while self._received and not batch.check_decode_mem():
                self._recompute_newest()
        return super().update_running_batch(batch)

    def _recompute_newest(self) -> None:
        """The last received request gives its pages back and will be prefilled here."""
        _, receiving = self._received.popitem()
        logger.warning(
            "request %s, room %d: prefilled here although its KV was received, because the KV pool is full "
            "(--max-total-tokens, --mem-fraction-static)",
            receiving.req.rid,
            receiving.pd.room,
        )
        self._release(receiving)

    def _release(self, receiving: Receiving) -> None:
        assert receiving.reservation is not None
        compat.drop_prefix(receiving.req)
        self._pages.give_back(receiving.reservation)

    def abort_request(self, recv_req: Any) -> None:
        super().abort_request(recv_req)
        for receiving in list(self._recv_queue):
            if compat.matches(recv_req, receiving.req):
                self._recv_queue.remove(receiving)
                receiving.receiver.abort("the client gave the request up")
                if receiving.reservation is not None:
                    self._pages.give_back(receiving.reservation)
                compat.fail(receiving.req, "Aborted", None)
                self._answer(receiving.req)
        queued = set(map(id, self.waiting_queue))
        for key in [key for key in self._received if key not in queued]:
            self._release(self._received.pop(key))

    def _num_transfers(self) -> int:
        return len(self._recv_queue) + len(self._received)
