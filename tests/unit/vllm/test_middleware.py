"""The ASGI shell: which bytes reach the application, and what it hears of the client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sgl_pd_connector.vllm.middleware import Message, PDMiddleware, Receive, Scope, Send
from sgl_pd_connector.vllm.rewrite import Role

pytestmark = pytest.mark.unit

ROUTER = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8000, "bootstrap_room": 7}


class Recorder:
    """An application that reads its whole request and the message after it."""

    def __init__(self) -> None:
        self.scope: Scope = {}
        self.messages: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        while True:
            message = await receive()
            self.messages.append(message)
            if message["type"] == "http.disconnect":
                return

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.scope["headers"])


def call(
    chunks: list[bytes], *, role: Role | None = "prefill", limit: int = 1000, **scope: Any
) -> tuple[Recorder, list[Message]]:
    """Sends one request whose client leaves after its last chunk."""
    app, sent = Recorder(), []
    incoming = [
        {"type": "http.request", "body": chunk, "more_body": i < len(chunks) - 1}
        for i, chunk in enumerate(chunks)
    ]
    incoming.append({"type": "http.disconnect"})
    feed = iter(incoming)

    async def receive() -> Message:
        return next(feed)

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [
        (b"content-type", b"application/json"),
        (b"Content-Length", str(sum(map(len, chunks))).encode()),
    ]
    full = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, **scope}
    asyncio.run(PDMiddleware(app, role, limit)(full, receive, send))
    return app, sent


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_a_rewritten_body_arrives_with_its_own_length() -> None:
    whole = encoded({"prompt": "hi", "max_tokens": 9, **ROUTER})
    app, _ = call([whole[:10], whole[10:30], whole[30:]])
    assert json.loads(app.body)["max_tokens"] == 1
    assert app.headers[b"content-length"] == str(len(app.body)).encode()
    assert b"Content-Length" not in app.headers
    assert [message["type"] for message in app.messages] == ["http.request", "http.disconnect"]


def test_a_chunked_request_becomes_one_with_a_length() -> None:
    app, _ = call([encoded({"prompt": "hi", **ROUTER})], headers=[(b"transfer-encoding", b"chunked")])
    assert app.headers.keys() == {b"content-length"}


@pytest.mark.parametrize(
    "chunks",
    [
        [b'{"prompt": "hi",  ', b'"max_tokens":9 }'],
        [b'{"prompt": "say \\"bootstrap_room\\""}'],
        [b'{"bootstrap_room": 7'],
        [b'["bootstrap_room"]', b""],
        [b'"bootstrap_room"' + b"[" * 900],
        [b'\xff\xfe"bootstrap_room'],
        [b""],
    ],
    ids=["ordinary", "name in a text", "broken", "array", "deep", "not utf-8", "empty"],
)
def test_everything_else_passes_byte_for_byte(chunks: list[bytes]) -> None:
    app, sent = call(chunks)
    assert [message.get("body") for message in app.messages] == [*chunks, None]
    assert app.headers[b"Content-Length"] == str(sum(map(len, chunks))).encode()
    assert not sent


@pytest.mark.parametrize(
    "scope",
    [
        {"path": "/v1/models"},
        {"path": "/v1/responses"},
        {"method": "GET"},
        {"type": "websocket"},
        {"root_path": "/v1"},
    ],
)
def test_other_endpoints_are_not_read(scope: dict[str, Any]) -> None:
    chunks = [encoded({"bootstrap_room": "wrong"}), b"x" * 2000]
    app, sent = call(chunks, **scope)
    assert [message.get("body") for message in app.messages] == [*chunks, None]
    assert not sent


def test_the_endpoint_is_found_below_a_root_path() -> None:
    app, _ = call(
        [encoded({"messages": [], **ROUTER})], path="/proxy/v1/chat/completions", root_path="/proxy"
    )
    assert json.loads(app.body)["max_tokens"] == 1


def test_a_wrong_field_is_answered_as_vllm_would() -> None:
    app, sent = call([encoded({"prompt": "hi", **ROUTER, "bootstrap_room": "x"})])
    assert not app.messages
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert error == {
        "message": "bootstrap_room must be a whole number from 0 to 2**63 - 1, not 'x'",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(sent[1]["body"])).encode()


def test_a_body_over_the_limit_is_refused_without_reading_it_all() -> None:
    app, sent = call([b"x" * 600, b"x" * 600, b"never read"], limit=1000)
    assert not app.messages
    assert sent[0]["status"] == 413
    assert b"larger than 1000 bytes" in sent[1]["body"]


def test_a_client_that_leaves_while_sending_is_reported() -> None:
    app, sent = call([b'{"bootstrap_room": 7,'], headers=[])
    assert app.messages[-1]["type"] == "http.disconnect"
    assert not sent


class Namespace:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def application(**kv: Any) -> Any:
    config = Namespace(kv_transfer_config=Namespace(**kv) if kv else None)
    return Namespace(state=Namespace(vllm_config=config))


def test_the_role_is_that_of_the_server_it_runs_in() -> None:
    app = application(kv_connector="SglJaxConnector", kv_role="kv_consumer")
    body = {"prompt": "hi", "max_tokens": 9, **ROUTER}
    recorder, _ = call([encoded(body)], role=None, app=app)
    out = json.loads(recorder.body)
    assert out["max_tokens"] == 9
    assert out["kv_transfer_params"]["do_remote_prefill"] is True


@pytest.mark.parametrize(
    "app", [application(), application(kv_connector="NixlConnector", kv_role="kv_producer")]
)
def test_a_server_without_our_connector_is_left_alone(app: Any) -> None:
    chunks = [encoded({"prompt": "hi", **ROUTER})]
    recorder, _ = call(chunks, role=None, app=app)
    assert recorder.messages[0]["body"] == chunks[0]
