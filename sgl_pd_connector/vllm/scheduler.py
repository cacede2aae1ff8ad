"""The scheduler side: which requests are transferred, and what vLLM's scheduler may do with their pages.

It knows requests but neither devices nor peers; everything it learns about a transfer comes from the worker
side, once per step, as `WorkerMetadata`. One class per role, with the same hooks, called on the scheduler's
thread.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import Any, Protocol

from sgl_pd_connector.errors import RequestError
from sgl_pd_connector.vllm.metadata import Load, StepMetadata, Transfer, WorkerMetadata
from sgl_pd_connector.wire import params
from sgl_pd_connector.wire.rooms import prompt_digest

logger = logging.getLogger(__name__)


class Request(Protocol):
    """What is used of ``vllm.v1.request.Request``."""

    request_id: str
    prompt_token_ids: list[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    max_tokens: int
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any
    cache_salt: str | None
    mm_features: list[Any]
    abort_immediately: bool
    status: Any


class SchedulerSide(Protocol):
    """The hooks of ``KVConnectorBase_V1`` that both roles have, in the order a request meets them."""

    def add(self, request: Request) -> None:
        """A request arrived."""

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Tokens beyond ``num_computed`` that come from P (None: ask again); whether to wait for them."""

    def allocated(self, request: Request, page_ids: list[int], num_external: int) -> None:
        """Pages were allocated for it; ``num_external`` tokens of them are to be filled from P."""

    def build(self, scheduler_output: Any) -> StepMetadata:
        """The orders for the step that was just scheduled."""

    def update(self, worker: WorkerMetadata, received: set[str]) -> None:
        """What the worker side reports after a step; ``received``: loads that ended, well or not."""

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """It finished or was aborted. Returns whether its pages stay allocated, and fields for its answer."""


def transfer_of(request: Request, room: int, bootstrap_addr: str | None = None) -> Transfer:
    """The transfer of a request's prompt.

    Raises:
        RequestError: the prompt has no token ids to pair P and D by.
    """
    if request.prompt_token_ids is None:
        raise RequestError("a prompt given as embeddings is not transferred")
    digest = prompt_digest(request.prompt_token_ids, _salt(request))
    return Transfer(room, digest, request.num_prompt_tokens, bootstrap_addr)


def _salt(request: Request) -> bytes:
    """What beside the tokens decides the KV. Equal on P and D, which were sent the same body."""
    lora = request.lora_request.lora_name if request.lora_request is not None else None
    images = [feature.identifier for feature in request.mm_features]
    if lora is None and request.cache_salt is None and not images:
        return b""
    return repr((lora, request.cache_salt, images)).encode()


@dataclass(slots=True)
class _Delivery:
    """A request on P whose prompt a decode server waits for."""

    request: Request
    room: int
    answers: bool
    sent: bool = False
    released: bool = False


class PrefillScheduler:
    """P: announces rooms on arrival, orders the send in the step that computes a prompt's last token.

    A prompt's pages may be freed as soon as the worker has copied them out, which is normally within that
    step; until the worker says so a finished request holds them.
    """

    def __init__(self, page_size: int, bootstrap_addr: str) -> None:
        self._page_size = page_size
        self._bootstrap_addr = bootstrap_addr
        self._deliveries: dict[str, _Delivery] = {}
        self._next = StepMetadata()

    def add(self, request: Request) -> None:
        try:
            wanted = params.for_prefill(request.kv_transfer_params)
            if wanted is None:
                return
            transfer = transfer_of(request, wanted.room)
        except RequestError as error:
            logger.warning("request %s is served without a transfer: %s", request.request_id, error)
            return
        # The middleware says so already; requests that came another way must not decode here either.
        request.max_tokens = 1
        self._deliveries[request.request_id] = _Delivery(request, wanted.room, wanted.answers)
        self._next.opened[request.request_id] = transfer

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        return 0, False

    def allocated(self, request: Request, page_ids: list[int], num_external: int) -> None:
        pass

    def build(self, scheduler_output: Any) -> StepMetadata:
        for request_id in scheduler_output.preempted_req_ids or ():
            delivery = self._deliveries.get(request_id)
            if delivery is not None and delivery.sent:
                self._next.preempted.append(request_id)
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            delivery = self._deliveries.get(request_id)
            if delivery is None or delivery.sent:
                continue
            request = delivery.request
            if request.num_computed_tokens + num_scheduled >= request.num_prompt_tokens:
                (page_ids,) = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
                num_pages = -(-request.num_prompt_tokens // self._page_size)
                self._next.sends[request_id] = page_ids[:num_pages]
                delivery.sent = True
        orders, self._next = self._next, StepMetadata()
        return orders

    def update(self, worker: WorkerMetadata, received: set[str]) -> None:
        for request_id in worker.released:
            if (delivery := self._deliveries.get(request_id)) is not None:
                delivery.released = True

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        delivery = self._deliveries.pop(request.request_id, None)
        if delivery is None:
            return False, None
        if not delivery.sent:
            self._next.dropped[request.request_id] = f"prefill did not complete: {_status(request)}"
            return False, None
        if not delivery.released:
            self._next.held.append(request.request_id)
        answer = params.answer(delivery.room, self._bootstrap_addr) if delivery.answers else None
        return not delivery.released, answer


class _Phase(enum.Enum):
    WAITING = "P has not announced the prompt's KV"
    READY = "pages may be allocated"
    LOADING = "pages are being written"
    FAILED = "there will be no KV from P"


class DecodeScheduler:
    """D: asks for the prompt on arrival, lets vLLM allocate when P is ready, and load once per request.

    A request leaves the books when it no longer depends on P: loaded, failed, served locally or finished.
    What vLLM does with it later (preemption, recomputation) is local.
    """

    def __init__(self, page_size: int, bootstrap_addr: str | None, *, recompute_failures: bool) -> None:
        """
        Args:
            page_size: tokens per page.
            bootstrap_addr: where to look P up if a request does not say.
            recompute_failures: whether a request without KV from P is prefilled here; else it fails.
        """
        self._page_size = page_size
        self._bootstrap_addr = bootstrap_addr
        self._recompute_failures = recompute_failures
        self._phases: dict[str, _Phase] = {}
        self._next = StepMetadata()

    def add(self, request: Request) -> None:
        try:
            wanted = params.for_decode(request.kv_transfer_params)
            if wanted is None:
                return
            address = wanted.bootstrap_addr or self._bootstrap_addr
            if address is None:
                raise RequestError(
                    f"the request has no {params.PORT} and this server no bootstrap_addr: give the router the "
                    "bootstrap port after the prefill server's URL"
                )
            if request.abort_immediately:
                # Stands, with one made-up token, for a request that vLLM's HTTP server has refused.
                self._next.refused[request.request_id] = Transfer(wanted.room, b"", 0, address)
                return
            transfer = transfer_of(request, wanted.room, address)
        except RequestError as error:
            logger.warning("request %s is prefilled here: %s", request.request_id, error)
            return
        self._phases[request.request_id] = _Phase.WAITING
        self._next.opened[request.request_id] = transfer

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        phase = self._phases.get(request.request_id)
        # vLLM computes the last token again in any case: KV up to it is all that a local cache has to hold.
        cached = num_computed > 0 and num_computed >= request.num_prompt_tokens - 1
        if phase is None or cached:
            return 0, False
        if phase is _Phase.WAITING:
            return None, False
        if phase is _Phase.FAILED and self._recompute_failures:
            return 0, False
        # A failure under policy "fail" is reported as a failed load: the one road on which vLLM ends a
        # request.
        return request.num_prompt_tokens - num_computed, True

    def allocated(self, request: Request, page_ids: list[int], num_external: int) -> None:
        request_id = request.request_id
        phase = self._phases.get(request_id)
        if phase is None:
            return
        if num_external == 0:
            # Local cache or policy made the transfer unnecessary, or vLLM will not use external KV for this
            # request.
            del self._phases[request_id]
            self._next.dropped[request_id] = "the decode server does not need the KV"
            return
        num_pages = -(-request.num_prompt_tokens // self._page_size)
        skip_pages = (request.num_prompt_tokens - num_external) // self._page_size
        self._next.loads[request_id] = Load(page_ids[skip_pages:num_pages], skip_pages)
        self._phases[request_id] = _Phase.LOADING

    def build(self, scheduler_output: Any) -> StepMetadata:
        orders, self._next = self._next, StepMetadata()
        return orders

    def update(self, worker: WorkerMetadata, received: set[str]) -> None:
        for request_id in worker.ready:
            if self._phases.get(request_id) is _Phase.WAITING:
                self._phases[request_id] = _Phase.READY
        for request_id, reason in worker.failed.items():
            if request_id in self._phases:
                self._log_failure(request_id, reason)
                self._phases[request_id] = _Phase.FAILED
        for request_id in received:
            self._phases.pop(request_id, None)

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if self._phases.pop(request.request_id, None) is not None:
            # Pages being written stay allocated: vLLM waits for the load's end, which the drop makes
            # immediate.
            self._next.dropped[request.request_id] = f"request ended on the decode server: {_status(request)}"
        return False, None

    def _log_failure(self, request_id: str, reason: str) -> None:
        if self._recompute_failures:
            logger.warning("request %s: no KV from P: %s; prefilling it here", request_id, reason)
        else:
            logger.error(
                "request %s fails: no KV from P: %s (kv_load_failure_policy=recompute would prefill it here)",
                request_id,
                reason,
            )


def _status(request: Request) -> str:
    return str(getattr(request.status, "name", request.status)).lower()
