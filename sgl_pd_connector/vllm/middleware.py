"""The ASGI shell around `rewrite`: reads the body of two endpoints, replaces it, and stays out of everything else.

The plugin adds it by itself when the connector is configured; the same by hand is
``--middleware sgl_pd_connector.vllm.middleware.PDMiddleware``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sgl_pd_connector.errors import RequestError
from sgl_pd_connector.vllm.rewrite import PARAMS, Endpoint, Role, rewrite

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

ENDPOINTS: dict[str, Endpoint] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
}
MAX_BODY_BYTES = 256 << 20
"""A longer body is refused: its fields cannot be read without holding it, and passing it on would lose them."""

# A body without any of these names cannot concern us and is not even parsed.
_MARKS = (b'"bootstrap_', f'"{PARAMS}"'.encode())


class PDMiddleware:
    """Brings the routers' ``bootstrap_*`` fields to the connector, and makes P answer after one token.

    Args:
        app: the ASGI application behind.
        role: what this server does. By default it is taken, at the first request, from the vLLM configuration of the
            application this runs in; a server without our connector is left alone.
        max_body_bytes: see `MAX_BODY_BYTES`.
    """

    def __init__(self, app: App, role: Role | None = None, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._role = role
        self._looked_up = role is not None
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = _endpoint(scope)
        role = self._role_in(scope) if endpoint else None
        if endpoint is None or role is None:
            await self._app(scope, receive, send)
            return
        chunks, total = await self._read_body(receive)
        if total > self._max_body_bytes:
            await _refuse(send, 413, f"the request body is larger than {self._max_body_bytes} bytes")
            return
        body = b"".join(chunk.get("body", b"") for chunk in chunks)
        try:
            changed = _rewritten(body, endpoint, role)
        except RequestError as error:
            await _refuse(send, 400, str(error))
            return
        if changed is not None:
            scope = {**scope, "headers": _with_length(scope["headers"], len(changed))}
            chunks = [{"type": "http.request", "body": changed, "more_body": False}]
        await self._app(scope, _replay(chunks, receive), send)

    def _role_in(self, scope: Scope) -> Role | None:
        if not self._looked_up:
            from sgl_pd_connector.vllm.compat import role_of_app

            self._role = role_of_app(scope["app"])
            self._looked_up = True
        return self._role

    async def _read_body(self, receive: Receive) -> tuple[list[Message], int]:
        """All messages up to the end of the body, or as many as show that it is too long, or that the client left."""
        chunks: list[Message] = []
        total = 0
        while True:
            message = await receive()
            chunks.append(message)
            total += len(message.get("body", b""))
            if (
                message["type"] != "http.request"
                or not message.get("more_body")
                or total > self._max_body_bytes
            ):
                return chunks, total


def _endpoint(scope: Scope) -> Endpoint | None:
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    return ENDPOINTS.get(scope["path"].removeprefix(scope.get("root_path", "")))


def _rewritten(body: bytes, endpoint: Endpoint, role: Role) -> bytes | None:
    """The new body, or None to leave the old one. What is not a JSON object is vLLM's to complain about."""
    if not any(mark in body for mark in _MARKS):
        return None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    changed = rewrite(parsed, endpoint, role)
    return None if changed is None else json.dumps(changed, separators=(",", ":")).encode()


def _with_length(headers: list[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    dropped = (b"content-length", b"transfer-encoding")
    kept = [(name, value) for name, value in headers if name.lower() not in dropped]
    return [*kept, (b"content-length", str(length).encode())]


def _replay(chunks: list[Message], receive: Receive) -> Receive:
    """A receive channel that first repeats ``chunks`` and then is the real one, so a disconnect is still heard."""
    pending = iter(chunks)

    async def replayed() -> Message:
        for chunk in pending:
            return chunk
        return await receive()

    return replayed


async def _refuse(send: Send, status: int, message: str) -> None:
    """An error in the shape of OpenAI's API, as vLLM writes them."""
    logger.info("refused a request: %s", message)
    kind = "BadRequestError" if status == 400 else "RequestEntityTooLarge"
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
