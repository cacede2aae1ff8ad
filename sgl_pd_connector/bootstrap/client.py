"""The other end of the bootstrap server's HTTP interface."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

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

MAX_ANSWER_BYTES = 64 << 20
"""No answer is longer: more than 100,000 usual routes of 0.5 KB, or 5,000 of the largest."""


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


class _Answer(NamedTuple):
    """What a server answered, whole."""

    method: str
    url: httpx.URL
    status: int
    content: bytes


class BootstrapClient:
    """Calls one bootstrap server; blocks, so never from an engine's thread. May be shared by threads.

    A call that gets no answer is tried up to three times within ``timeout``: every request can safely be
    repeated. An answer is final, and no longer than `MAX_ANSWER_BYTES`. No proxy of the environment is used and no
    redirect followed.

    Args:
        address: of the server.
        timeout: seconds for one call, all tries and the whole answer included.
        timeout_setting: name of the setting that ``timeout`` is the value of, for messages.
        auth_token: the shared secret, if the server wants one.
    """

    def __init__(
        self,
        address: Address,
        *,
        timeout: float = 5.0,
        timeout_setting: str | None = None,
        auth_token: str | None = None,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._within = f"{timeout:g} s" + (f" (setting {timeout_setting})" if timeout_setting else "")
        self._http = httpx.Client(
            base_url=address.url(),
            # Not compressed: the bound on an answer's size is one on what is kept in memory.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {auth_token}"} if auth_token is not None else {}),
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
        answer = self._call("GET", "/route", params=key.query(), accept=(200, 404))
        if answer.status == 404:
            # A server of another kind does not know the path and names no field.
            refusal = self._refusal(answer)
            if refusal.field is None:
                raise refusal
            return None
        return _parsed(Route, answer)

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
    ) -> _Answer:
        """One answered request.

        Raises:
            BootstrapUnavailableError: no whole answer within the timeout.
            BootstrapRefusedError: an answer with another status than those to ``accept``.
            BootstrapError: an answer that is too long.
        """
        deadline = time.monotonic() + self._timeout
        headers = {"Content-Type": "application/json"} if content is not None else {}
        request = self._http.build_request(method, path, params=params, content=content, headers=headers)
        pause = _FIRST_PAUSE
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._try(request, deadline)
                break
            except httpx.RequestError as error:
                now = time.monotonic()
                if attempt == ATTEMPTS or now + pause >= deadline:
                    late = now >= deadline or isinstance(error, httpx.TimeoutException)
                    why = "timed out before it was complete" if late else str(error) or type(error).__name__
                    raise BootstrapUnavailableError(
                        f"no answer from the bootstrap server at {self.address} to {method} {path} "
                        f"in {attempt} tries within {self._within}: {why}: is it running there? "
                        "(bootstrap_addr, bootstrap_port)"
                    ) from None
                time.sleep(pause)
                pause *= 2
        if answer.status not in accept:
            raise self._refusal(answer)
        return answer

    def _try(self, request: httpx.Request, deadline: float) -> _Answer:
        left = max(deadline - time.monotonic(), 0.001)
        with _cut_off(deadline) as trace:
            request.extensions = {"timeout": httpx.Timeout(left).as_dict(), "trace": trace}
            response = self._http.send(request, stream=True)
            with contextlib.closing(response):
                content = bytearray()
                for piece in response.iter_raw():
                    content += piece
                    if len(content) > MAX_ANSWER_BYTES:
                        raise BootstrapError(
                            f"the answer of {self.address} to {request.method} {request.url.path} is longer than "
                            f"{MAX_ANSWER_BYTES >> 20} MiB (MAX_ANSWER_BYTES): is that a bootstrap server? "
                            "(bootstrap_addr, bootstrap_port)"
                        )
        return _Answer(request.method, request.url, response.status_code, bytes(content))

    def _refusal(self, answer: _Answer) -> BootstrapRefusedError:
        try:
            reply = ErrorReply.model_validate_json(answer.content)
        except ValidationError:
            text = answer.content[:400].decode(errors="replace")[:100]
            reply = ErrorReply(error=f"not the answer of a bootstrap server: {text!r}")
        return BootstrapRefusedError(
            f"bootstrap server at {self.address} refused {answer.method} "
            f"{answer.url.path} ({answer.status}): {reply.error}",
            answer.status,
            reply.field,
        )


@contextlib.contextmanager
def _cut_off(deadline: float) -> Iterator[Any]:
    """Yields a trace hook for one request, whose connection is shut down at ``deadline``.

    httpx has timeouts for each read and write only: a server that sends a byte now and then, of the headers or of the
    body, would never meet one. A timer's thread, ended here, does it.
    """
    with contextlib.ExitStack() as stack:

        def trace(event: str, info: Mapping[str, Any]) -> None:
            if event != "connection.connect_tcp.complete":
                return
            # Of our own, so that it is not another connection's by the time that the timer fires.
            connection = stack.enter_context(info["return_value"].get_extra_info("socket").dup())
            timer = threading.Timer(max(deadline - time.monotonic(), 0.0), _shut_down, [connection])
            timer.name, timer.daemon = "sgl-pd-http-deadline", True
            timer.start()
            stack.callback(timer.join)
            stack.callback(timer.cancel)

        yield trace


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def _parsed[Model: BaseModel](model: type[Model], answer: _Answer) -> Model:
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise BootstrapError(
            f"{answer.method} {answer.url} was not answered as a bootstrap server does: {field}: {first['msg']}"
        ) from None
