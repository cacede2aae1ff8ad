"""One request's disaggregation: what a router asked for, as both servers understand it.

The record is made in the HTTP process, where the request is tokenized, and travels to the scheduler with it. Both
servers get the same body and follow the same rules, so they agree without talking.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sgl_pd_connector.errors import RequestError
from sgl_pd_connector.sgl_jax.server_args import PREFIX, DisaggregationArgs
from sgl_pd_connector.wire.params import BOOTSTRAP_FIELDS, HOST, PORT, ROOM, for_decode, for_prefill
from sgl_pd_connector.wire.rooms import prompt_digest

KV_TRANSFER_PARAMS = "kv_transfer_params"

request_params: ContextVar[Mapping[str, Any]] = ContextVar(KV_TRANSFER_PARAMS)
"""``kv_transfer_params`` of the HTTP request being handled; sgl-jax's own request classes drop that field."""


@dataclass(frozen=True, slots=True)
class PDRequest:
    """What the schedulers need to know.

    Attributes:
        room: the router's.
        prompt: digest of the whole prompt; with the room it pairs P's request and D's.
        num_tokens: leading tokens of the prompt whose KV is transferred.
        bootstrap_addr: ``host:port`` where P is registered; None on P.
        kv_transfer_params: what stood beside the router's fields.
    """

    room: int
    prompt: bytes
    num_tokens: int
    bootstrap_addr: str | None
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)


def transferred_tokens(num_tokens: int, logprob_start: int | None) -> int:
    """How many leading tokens of a prompt are transferred.

    D needs logits where it samples (the last token) and wherever the client wants logprobs of the prompt, so it runs
    the rest of the prompt itself. Usually that is one token.

    Args:
        num_tokens: tokens of the prompt.
        logprob_start: first position whose logprobs are wanted; None or negative: none are.
    """
    wanted = num_tokens - 1
    if logprob_start is not None and logprob_start >= 0:
        wanted = min(wanted, logprob_start)
    return max(wanted, 0)


def read(args: DisaggregationArgs, obj: Any, input_ids: list[int]) -> PDRequest | None:
    """Reads the fields of one request; None for an ordinary one.

    Args:
        args: of this server.
        obj: sgl-jax's ``GenerateReqInput`` of one prompt (not a list of them).
        input_ids: the prompt.

    Raises:
        RequestError: the fields are malformed, or ask for what is not implemented.
    """
    params = request_params.get({})
    fields = dict(params)
    fields.update({name: value for name in BOOTSTRAP_FIELDS if (value := getattr(obj, name)) is not None})
    if fields.get(HOST) is None:
        fields.pop(PORT, None)
    elif fields.get(PORT) is None:
        fields[PORT] = args.config.bootstrap_port
    bootstrap_addr = None
    if args.mode == "prefill":
        prefill = for_prefill(fields)
        if prefill is None:
            return None
        if fields.get(ROOM) is None:
            raise RequestError(
                f"{ROOM} is missing: sgl-jax servers need a router that sends both servers one body"
            )
        room = prefill.room
    else:
        decode = for_decode(fields)
        if decode is None:
            return None
        room, bootstrap_addr = decode.room, decode.bootstrap_addr or args.bootstrap_addr
        if bootstrap_addr is None:
            raise RequestError(
                f"{HOST} is missing, and {PREFIX}bootstrap-host does not say where P is registered"
            )
    if obj.return_routed_experts:
        raise RequestError(
            "return_routed_experts: the experts of a prompt are known only where it was prefilled"
        )
    if obj.contains_mm_input():
        raise RequestError("images, audio and video are not transferred between prefill and decode servers")
    try:
        prompt = prompt_digest(input_ids)
    except OverflowError:
        raise RequestError("input_ids must be token ids: whole numbers from 0 to 2**32 - 1") from None
    logprob_start = obj.logprob_start_len if obj.return_logprob else None
    return PDRequest(
        room=room,
        prompt=prompt,
        num_tokens=transferred_tokens(len(input_ids), logprob_start),
        bootstrap_addr=bootstrap_addr,
        kv_transfer_params=params,
    )
