"""What happens to the JSON body of one OpenAI request before vLLM reads it. Dictionaries in and out, no I/O.

sglang's routers post the same body to P and D, with three top-level fields that vLLM's request models drop. They are
moved into ``kv_transfer_params``, which vLLM hands to its connector. Sequential proxies use ``kv_transfer_params``
already (``do_remote_decode``, then ``do_remote_prefill``); those are validated in the same place.

========== ========================================================================================================
leg        body that vLLM gets
========== ========================================================================================================
prefill    one token, not streamed; ``kv_transfer_params`` with a ``bootstrap_room``, made here if nobody gave one
decode     as the client wrote it; ``kv_transfer_params`` with ``do_remote_prefill`` and ``bootstrap_*``
========== ========================================================================================================

Only fields that depend on the number of tokens or on streaming are changed on the prefill leg. All others stay, for two
reasons: many of them shape the prompt (tools, response formats, chat template arguments), and what decode refuses,
prefill should refuse too instead of keeping a KV cache that nobody will fetch. ``n`` and lists of prompts stay as well:
each sample on D fetches one copy, so P must make as many.

Some answers need the prompt's own activations (log-probabilities of the prompt), or prompts that are not tokens, or
many engine requests of growing length (beam search). D computes those whole, by itself, from an ordinary request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from sgl_pd_connector.errors import RequestError
from sgl_pd_connector.wire.params import (
    BOOTSTRAP_FIELDS,
    REMOTE_PREFILL,
    ROOM,
    for_decode,
    for_prefill,
)

Body = dict[str, Any]
Endpoint = Literal["completions", "chat"]
Role = Literal["prefill", "decode"]

PARAMS = "kv_transfer_params"

# vLLM's own limits when a request names none; chat has none.
_DEFAULT_MAX_TOKENS: dict[Endpoint, int | None] = {"completions": 16, "chat": None}


def rewrite(body: Mapping[str, Any], endpoint: Endpoint, role: Role) -> Body | None:
    """The body for the engine, or None when the request has nothing to do with us and must not be touched.

    Args:
        body: the parsed request.
        endpoint: ``/v1/completions`` or ``/v1/chat/completions``.
        role: what this server does.

    Raises:
        RequestError: a disaggregation field has a wrong type or value, or was sent to the wrong server.
    """
    params = _merged_params(body)
    params = None if params is None else _checked(params, role)
    if params is None:
        return None
    out = {name: value for name, value in body.items() if name not in (*BOOTSTRAP_FIELDS, PARAMS)}
    whole_on_decode = _needs_prompt_on_decode(out, endpoint)
    if not whole_on_decode:
        out[PARAMS] = params
    if role == "prefill":
        _limit_to_one_token(out, endpoint)
        if whole_on_decode:
            _drop_what_decode_computes(out)
    return out


def _merged_params(body: Mapping[str, Any]) -> Body | None:
    """``kv_transfer_params`` with the top-level fields in it, lists reduced; None if there are neither."""
    top = {name: body[name] for name in BOOTSTRAP_FIELDS if body.get(name) is not None}
    given = body.get(PARAMS)
    if given is not None and not isinstance(given, Mapping):
        if top:
            raise RequestError(f"{PARAMS} must be an object, not {given!r}")
        return None  # vLLM has its own words for it
    params = {name: value for name, value in (given or {}).items() if value is not None}
    for name, value in top.items():
        if params.setdefault(name, value) != value:
            raise RequestError(f"{name} = {value!r} contradicts {PARAMS}.{name} = {params[name]!r}")
    if top and ROOM not in params:
        raise RequestError(f"{ROOM} is missing beside {' and '.join(top)}")
    params.update({name: _single(name, params[name]) for name in BOOTSTRAP_FIELDS if name in params})
    return params or None


def _single(name: str, value: Any) -> Any:
    """The value, or the first of a list with one entry per prompt.

    Prompts in one body are told apart by their contents, so any choice of room does that is the same on P and D.
    """
    if not isinstance(value, list):
        return value
    if not value:
        raise RequestError(f"{name} is an empty list")
    if name != ROOM and any(item != value[0] for item in value):
        raise RequestError(f"{name} names several prefill servers for one request: {value!r}")
    return value[0]


def _checked(params: Body, role: Role) -> Body | None:
    """``params`` as the connector wants them, every field validated; None for an ordinary request."""
    if role == "decode":
        # The flag makes vLLM tell the connector of requests that it refuses before they reach the engine.
        return None if for_decode(params) is None else {**params, REMOTE_PREFILL: True}
    parsed = for_prefill(params)
    if parsed is None:
        return None
    # Where D will look is not P's business, but what D will refuse P should refuse.
    for_decode({name: params.get(name) for name in BOOTSTRAP_FIELDS} | {ROOM: parsed.room})
    # One room for everything in this body: a sequential proxy hands over only one of P's answers.
    return {**params, ROOM: parsed.room}


def _needs_prompt_on_decode(body: Mapping[str, Any], endpoint: Endpoint) -> bool:
    # vLLM turns `echo` into prompt log-probabilities: of `logprobs` on completions, always on chat.
    echo = _is_true(body.get("echo")) and (endpoint == "chat" or body.get("logprobs") is not None)
    return (
        echo
        or body.get("prompt_logprobs") is not None
        or body.get("prompt_embeds") is not None
        or _is_true(body.get("use_beam_search"))
    )


def _limit_to_one_token(body: Body, endpoint: Endpoint) -> None:
    """One token instead of as many as asked for. A limit that decode will refuse stays, so that both refuse it."""
    limit_name = "max_tokens"
    if endpoint == "chat" and body.get("max_completion_tokens") is not None:
        limit_name = "max_completion_tokens"
    given = body.get(limit_name)
    asked = _DEFAULT_MAX_TOKENS[endpoint] if given is None else _as_int(given)
    if given is None or (asked is not None and asked >= 1):
        body[limit_name] = 1
    least = _as_int(body.get("min_tokens"))
    if least is not None and 0 <= least <= (math.inf if asked is None else asked):
        del body["min_tokens"]
    if _is_true(body.get("stream")):
        body["stream"] = False
        body.pop("stream_options", None)


def _drop_what_decode_computes(body: Body) -> None:
    for name in ("echo", "prompt_logprobs", "use_beam_search", "n"):
        body.pop(name, None)


def _as_int(value: Any) -> int | None:
    """An integer as vLLM's request models read it: also ``"5"`` and ``5.0``."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(value, float) and number != value else number


def _is_true(value: Any) -> bool:
    """A flag as vLLM's request models read it."""
    return (
        value is True
        or value == 1
        or (isinstance(value, str) and value.lower() in ("true", "t", "yes", "y", "on", "1"))
    )
