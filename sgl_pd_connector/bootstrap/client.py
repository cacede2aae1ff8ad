"""The other end of the bootstrap server's HTTP interface."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import httpx
from pydantic import BaseModel, ValidationError

from sgl_pd_connector.errors import BootstrapError
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.routes import (
    Deleted,
    ErrorReply,
    Health,
    Heartbeat,
    HeartbeatReply,
    Registered,
    Role,
    Route,
    RouteKey,
    RouteList,
)

ATTEMPTS = 3
_FIRST_PAUSE = 0.1

# Heartbeats come every few seconds: a connection kept until the next one would be closed by the server just
# then.
_KEEP_ALIVE = 2.0


class BootstrapUnavailableError(BootstrapError):
    """Nobody answered in time: the server is down, unreachable, or not started yet. Worth another try."""


class BootstrapRefusedError(BootstrapError):
    """The server answered and said no; the same request will be refused again.

    Attributes:
        status: HTTP status.
        field: what is wrong in the request, if the server named it.
    """

    def __init__(self, message: str, status: int, field: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


class BootstrapClient:
    """Calls one bootstrap server; blocks, so never from an engine's thread. May be shared by threads.

    A call that gets no answer is tried up to three times within ``timeout``: every request can safely be
    repeated. An answer is final. No proxy of the environment is used and no redirect followed.

    Args:
        address: of the server.
        timeout: seconds for one call, all tries included.
        auth_token: the shared secret, if the server wants one.
    """

    def __init__(self, address: Address, *, timeout: float = 5.0, auth_token: str | None = None) -> None:
        self.address = address
        self._timeout = timeout
        self._http = httpx.Client(
            base_url=address.url(),
            headers={"Authorization": f"Bearer {auth_token}"} if auth_token is not None else {},
            trust_env=False,
            # Plain HTTP only: an empty trust store, because loading the real one costs each client 20 ms or
            # more.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            # One call, one connection: calls are seconds apart, and a connection kept for the next one
            # would be closed by the server just then, or occupy it in vain.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def put(self, route: Route) -> Registered:
        """Registers ``route``, in place of whoever holds its key."""
        return _parsed(Registered, self._call("PUT", "/route", content=route.wire_json))

    def delete(self, key: RouteKey, epoch: int | None = None) -> bool:
        """Deregisters ``key``, with ``epoch`` only if that epoch holds it; returns whether it did."""
        params = key.query() | ({"epoch": epoch} if epoch is not None else {})
        return _parsed(Deleted, self._call("DELETE", "/route", params=params)).deleted

    def get(self, key: RouteKey) -> Route | None:
        response = self._call("GET", "/route", params=key.query(), accept=(200, 404))
        if response.status_code == 404:
            # A server of another kind does not know the path and names no field.
            refusal = self._refusal(response)
            if refusal.field is None:
                raise refusal
            return None
        return _parsed(Route, response)

    def list(self, role: Role) -> Sequence[Route]:
        return _parsed(RouteList, self._call("GET", "/list", params={"role": role})).routes

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        content = beat.model_dump_json().encode()
        return _parsed(HeartbeatReply, self._call("POST", "/heartbeat", content=content))

    def health(self) -> Health:
        return _parsed(Health, self._call("GET", "/health"))

    def _call(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str | int] | None = None,
        content: bytes | None = None,
        accept: tuple[int, ...] = (200,),
    ) -> httpx.Response:
        """One answered request.

        Raises:
            BootstrapUnavailableError: no answer within the timeout.
            BootstrapRefusedError: an answer with another status than those to ``accept``.
        """
        deadline = time.monotonic() + self._timeout
        headers = {"Content-Type": "application/json"} if content is not None else {}
        pause = _FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            left = deadline - time.monotonic()
            try:
                response = self._http.request(
                    method, path, params=params, content=content, headers=headers, timeout=max(left, 0.001)
                )
                break
            except httpx.RequestError as error:
                if attempt == ATTEMPTS or time.monotonic() + pause >= deadline:
                    raise BootstrapUnavailableError(
                        f"no answer from the bootstrap server at {self.address} to {method} {path} "
                        f"in {attempt} tries within {self._timeout:g} s "
                        f"({str(error) or type(error).__name__}): is it running there? "
                        "(bootstrap_addr, bootstrap_port)"
                    ) from None
                time.sleep(pause)
                pause *= 2
        if response.status_code not in accept:
            raise self._refusal(response)
        return response

    def _refusal(self, response: httpx.Response) -> BootstrapRefusedError:
        try:
            reply = ErrorReply.model_validate_json(response.content)
        except ValidationError:
            reply = ErrorReply(error=f"not the answer of a bootstrap server: {response.text[:100]!r}")
        return BootstrapRefusedError(
            f"bootstrap server at {self.address} refused {response.request.method} "
            f"{response.request.url.path} ({response.status_code}): {reply.error}",
            response.status_code,
            reply.field,
        )


def _parsed[Model: BaseModel](model: type[Model], response: httpx.Response) -> Model:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise BootstrapError(
            f"{response.request.method} {response.url} was not answered as a bootstrap server does: "
            f"{field}: {first['msg']}"
        ) from None
