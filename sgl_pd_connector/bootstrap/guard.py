"""What every request passes before the application sees it: size and deadline of its body, and the secret."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_pd_connector.wire.routes import MAX_BODY_BYTES, ErrorReply

BODY_TIMEOUT = 10.0
"""Seconds a client may take to send its body."""

# A little more than allowed is read and thrown away: closing on unread data resets the connection, and the
# client would see that instead of the answer.
_DRAIN_BYTES = 16 * MAX_BODY_BYTES
_OPEN_PATHS = frozenset({"/health"})


def error_response(
    status: int, error: str, field: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    """The one form of every refusal."""
    return Response(
        ErrorReply(error=error, field=field).model_dump_json(), status, headers, "application/json"
    )


class Guard:
    """ASGI middleware in front of the bootstrap application.

    Args:
        app: the application.
        auth_token: the shared secret; requests must carry ``Authorization: Bearer <secret>``, except for
            ``/health``, which tells a probe nothing but numbers. None: no secret.
    """

    def __init__(self, app: ASGIApp, auth_token: str | None = None) -> None:
        self._app = app
        self._expected = f"Bearer {auth_token}".encode() if auth_token is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                body = await _read_body(receive)
            if body is None:
                refusal = error_response(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
            elif not self._allowed(scope):
                refusal = error_response(
                    401,
                    "the shared secret is missing or wrong: instances and bootstrap server need the same one",
                    "Authorization",
                    {"WWW-Authenticate": "Bearer"},
                )
            else:
                await self._app(scope, _replay(body, receive), send)
                return
        except TimeoutError:
            refusal = error_response(408, f"the body was not complete after {BODY_TIMEOUT:g} s")
        except ConnectionError:
            return
        # Whoever is refused here may still be sending.
        refusal.headers["Connection"] = "close"
        await refusal(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] in _OPEN_PATHS:
            return True
        given = Headers(scope=scope).get("authorization", "")
        return hmac.compare_digest(given.encode("latin-1"), self._expected)


async def _read_body(receive: Receive) -> bytes | None:
    """The body, or None if it is too long. Raises `ConnectionError` if the client went away."""
    body = bytearray()
    received = 0
    more = True
    while more and received <= _DRAIN_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        chunk = message.get("body", b"")
        received += len(chunk)
        if received <= MAX_BODY_BYTES:
            body += chunk
        more = message.get("more_body", False)
    return bytes(body) if received <= MAX_BODY_BYTES else None


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that delivers what was read, then whatever comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
