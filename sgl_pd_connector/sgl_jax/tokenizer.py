"""The HTTP process's part: reads a request's disaggregation fields, and turns failures into HTTP errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Request

from sgl_pd_connector.errors import RequestError
from sgl_pd_connector.sgl_jax import compat
from sgl_pd_connector.sgl_jax.requests import KV_TRANSFER_PARAMS, PDRequest, read, request_params
from sgl_pd_connector.sgl_jax.server_args import DisaggregationArgs

if TYPE_CHECKING:
    from sgl_pd_connector.sgl_jax.surface import TokenizerSurface as _TokenizerManager
else:
    _TokenizerManager = object

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 4.0
"""After SIGTERM: how long requests in flight may take to finish."""

STOP_SECONDS = 3.0
"""After that: how long the scheduler may take to tell its peers and end."""

_LOGPROBS = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")


class DisaggregationTokenizerMixin(_TokenizerManager):
    """Mixed in before sgl-jax's ``TokenizerManager``. `disaggregation` is set by whoever makes the class."""

    disaggregation: DisaggregationArgs

    async def generate_request(self, obj: Any, request: Request | None = None) -> AsyncIterator[Any]:
        request_params.set(await _kv_transfer_params(request))
        async for out in super().generate_request(obj, request):
            yield out

    def _create_tokenized_object(
        self, obj: Any, input_text: str, input_ids: list[int], mm_inputs: object | None = None
    ) -> Any:
        try:
            pd = read(self.disaggregation, obj, input_ids)
        except RequestError as error:
            # sgl-jax answers ValueError with status 400.
            raise ValueError(str(error)) from None
        tokenized = super()._create_tokenized_object(obj, input_text, input_ids, mm_inputs)
        if pd is not None:
            compat.attach(tokenized, pd)
            if self.disaggregation.mode == "prefill":
                compat.prefill_only(tokenized)
        return tokenized

    def _send_one_request(self, obj: Any, tokenized_obj: Any, created_time: float | None = None) -> Any:
        if compat.attached(tokenized_obj) is not None and self.disaggregation.mode == "prefill":
            compat.no_logprobs(obj)
        state = super()._send_one_request(obj, tokenized_obj, created_time)
        state.pd = compat.attached(tokenized_obj)
        return state

    async def _wait_one_response(
        self, obj: Any, state: Any, request: Request | None = None
    ) -> AsyncIterator[Any]:
        async for out in super()._wait_one_response(obj, state, request):
            if isinstance(state.pd, PDRequest):
                self._complete(out["meta_info"], stream=obj.stream)
            _raise_failure(out["meta_info"].get("finish_reason"), stream=obj.stream)
            yield out

    def _complete(self, meta_info: dict[str, Any], *, stream: bool) -> None:
        """Adds the lists that routers and OpenAI handlers look for: P computed none of them; mini_lb wants to join
        the prompt's in every event of a stream."""
        if self.disaggregation.mode == "prefill":
            for name in _LOGPROBS:
                meta_info.setdefault(name, [])
        elif stream and "output_token_logprobs" in meta_info:
            meta_info.setdefault("input_token_logprobs", [])

    def detokenize_logprob_tokens(
        self, token_logprobs_val: list[Any], token_logprobs_idx: list[Any], decode_to_text: bool
    ) -> list[Any]:
        # Without the overlap schedule they are NumPy scalars, which sgl-jax's streams cannot serialize.
        values = [None if value is None else float(value) for value in token_logprobs_val]
        return super().detokenize_logprob_tokens(values, list(map(int, token_logprobs_idx)), decode_to_text)

    def _handle_abort_req(self, recv_obj: Any) -> None:
        # sgl-jax never forgets a request aborted in the queue, and then waits for it at SIGTERM.
        if recv_obj.rid in self.rid_to_state:
            super()._handle_abort_req(recv_obj)
            del self.rid_to_state[recv_obj.rid]

    async def sigterm_watchdog(self) -> None:
        """Ends the server at SIGTERM: drains, lets the scheduler tell its peers, ends the process tree."""
        await _until(lambda: self.gracefully_exit)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await _until(lambda: not self.rid_to_state)
        if self.rid_to_state:
            logger.warning("SIGTERM: %d requests did not end in %g s", len(self.rid_to_state), DRAIN_SECONDS)
        self.shutdown()
        await asyncio.to_thread(stop_children)
        compat.kill_process_tree(include_self=True)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - sgl-jax sets attributes, not events
        await asyncio.sleep(0.1)


def stop_children() -> None:
    """SIGTERM to this server's processes; returns when they have ended, or after `STOP_SECONDS`."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(STOP_SECONDS)


async def _kv_transfer_params(request: Request | None) -> dict[str, Any]:
    if request is None or request.method != "POST":
        return {}
    # FastAPI has parsed the body for this same object already; this is its cached result.
    body = await request.json()
    params = body.get(KV_TRANSFER_PARAMS) if isinstance(body, dict) else None
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise ValueError(f"{KV_TRANSFER_PARAMS} must be an object, not {type(params).__name__}")
    return params


def _raise_failure(finish_reason: Any, *, stream: bool) -> None:
    """sgl-jax makes an HTTP error of status 400 only; what failed otherwise would be answered with 200."""
    if not isinstance(finish_reason, dict) or finish_reason.get("type") != "abort":
        return
    status = finish_reason.get("status_code")
    if status is None or int(status) < 400:
        return
    message = finish_reason.get("message") or "the request failed"
    if stream:
        # The 200 is on its way already: sgl-jax turns ValueError into an error event.
        raise ValueError(message)
    raise HTTPException(status_code=int(status), detail=message)
