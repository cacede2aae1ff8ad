"""A request's ``kv_transfer_params``: what the two router styles send, read and checked in one place.

Concurrent routers (sglang's) send P and D the same body with ``bootstrap_host``, ``bootstrap_port`` and
``bootstrap_room`` at its top; the middleware moves them into ``kv_transfer_params``. Sequential proxies
(vLLM's) ask P with ``{"do_remote_decode": true}`` and hand the ``kv_transfer_params`` of P's answer to D. A
request with neither is an ordinary one. Fields of other connectors are left alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_pd_connector.errors import ConfigError, RequestError
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.rooms import MAX_ROOM

HOST = "bootstrap_host"
PORT = "bootstrap_port"
ROOM = "bootstrap_room"
BOOTSTRAP_FIELDS = (HOST, PORT, ROOM)
REMOTE_DECODE = "do_remote_decode"
REMOTE_PREFILL = "do_remote_prefill"


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """What P needs to know of one request.

    Attributes:
        room: the router's, or one made here.
        answers: whether P's answer must carry the ``kv_transfer_params`` for D (sequential style).
    """

    room: int
    answers: bool


@dataclass(frozen=True, slots=True)
class DecodeParams:
    """What D needs to know of one request.

    Attributes:
        room: the one that P knows.
        bootstrap_addr: ``host:port`` where P is registered; None: this instance's own setting says it.
    """

    room: int
    bootstrap_addr: str | None


def for_prefill(params: object) -> PrefillParams | None:
    """Reads ``kv_transfer_params`` on a prefill server; None for an ordinary request.

    Raises:
        RequestError: a field is malformed, or the request was meant for a decode server.
    """
    fields = _fields(params)
    if _flag(fields, REMOTE_PREFILL):
        raise RequestError(
            f"kv_transfer_params: {REMOTE_PREFILL} is for a decode server, this one "
            "prefills; are prefill and decode servers swapped in the router's list?"
        )
    asked = _flag(fields, REMOTE_DECODE)
    room = _room(fields)
    if asked is False or (room is None and not asked):
        return None
    return PrefillParams(secrets.randbelow(MAX_ROOM) + 1 if room is None else room, answers=bool(asked))


def for_decode(params: object) -> DecodeParams | None:
    """Reads ``kv_transfer_params`` on a decode server; None for an ordinary request.

    Raises:
        RequestError: a field is malformed or missing, or the request was meant for a prefill server.
    """
    fields = _fields(params)
    if _flag(fields, REMOTE_DECODE):
        raise RequestError(
            f"kv_transfer_params: {REMOTE_DECODE} is for a prefill server, this one "
            "decodes; are prefill and decode servers swapped in the router's list?"
        )
    asked = _flag(fields, REMOTE_PREFILL)
    if asked is False:
        return None
    room = _room(fields)
    if room is None:
        if asked:
            raise RequestError(
                f"kv_transfer_params: {REMOTE_PREFILL} without {ROOM}: hand over the kv_transfer_params of "
                "the prefill server's answer unchanged; both servers must run this connector"
            )
        return None
    return DecodeParams(room, _bootstrap_addr(fields))


def answer(room: int, bootstrap_addr: str) -> dict[str, Any]:
    """The ``kv_transfer_params`` of P's answer, which a sequential proxy hands to D."""
    address = Address.parse(bootstrap_addr, setting="bootstrap_addr")
    return {REMOTE_PREFILL: True, REMOTE_DECODE: False, HOST: address.host, PORT: address.port, ROOM: room}


def _fields(params: object) -> Mapping[str, Any]:
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        raise RequestError(f"kv_transfer_params must be an object, not {type(params).__name__}")
    return params


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise RequestError(f"kv_transfer_params: {name} must be true or false, not {value!r}")


def _room(fields: Mapping[str, Any]) -> int | None:
    room = fields.get(ROOM)
    if room is None or (isinstance(room, int) and not isinstance(room, bool) and 0 <= room <= MAX_ROOM):
        return room
    raise RequestError(f"{ROOM} must be a whole number from 0 to 2**63 - 1, not {room!r}")


def _bootstrap_addr(fields: Mapping[str, Any]) -> str | None:
    host, port = fields.get(HOST), fields.get(PORT)
    if port is None:
        # mini_lb knows a port only when one follows the URL; else this instance's bootstrap_addr has to do.
        return None
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= 65_535:
        raise RequestError(f"{PORT} must be a port number from 1 to 65535, not {port!r}")
    if not isinstance(host, str):
        raise RequestError(f"{HOST} must be the bootstrap server's host name or address, not {host!r}")
    try:
        return str(Address.of(host, port, setting=HOST))
    except ConfigError as error:
        raise RequestError(str(error)) from None
