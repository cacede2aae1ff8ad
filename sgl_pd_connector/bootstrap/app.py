"""The bootstrap server's HTTP interface: endpoints over a `Registry`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from sgl_pd_connector.bootstrap.guard import Guard, error_response
from sgl_pd_connector.bootstrap.registry import Registry, RegistryFullError
from sgl_pd_connector.wire import routes as wire


def make_app(registry: Registry, auth_token: str | None = None) -> FastAPI:
    """The ASGI application. ``registry`` is touched only by its event loop."""
    # The interactive pages would load scripts from the internet; the schema itself stays.
    app = FastAPI(title="sgl-pd bootstrap server", docs_url=None, redoc_url=None)
    app.add_middleware(Guard, auth_token=auth_token)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(RegistryFullError, _registry_full)
    app.add_exception_handler(HTTPException, _http_error)

    @app.put("/route")
    async def put_route(route: wire.Route) -> wire.Registered:
        replaced = registry.put(route)
        _ = route.wire_json  # rendered now, so that listing thousands of routes is only a join
        return wire.Registered(ttl=registry.ttl, replaced=replaced)

    @app.delete("/route")
    async def delete_route(query: Annotated[wire.RouteGoodbye, Query()]) -> wire.Deleted:
        return wire.Deleted(deleted=registry.delete(query.key, query.epoch))

    @app.get("/route", response_model=wire.Route)
    async def get_route(query: Annotated[wire.RouteQuery, Query()]) -> Response:
        route = registry.get(query.key)
        if route is None:
            return error_response(404, f"no route of {query.key} is registered", "instance_id")
        return _json(route.wire_json)

    @app.get("/list", response_model=wire.RouteList)
    async def list_routes(role: wire.Role) -> Response:
        return _json(b'{"routes":[' + b",".join(route.wire_json for route in registry.routes(role)) + b"]}")

    @app.post("/heartbeat")
    async def heartbeat(beat: wire.Heartbeat) -> wire.HeartbeatReply:
        unknown, superseded = registry.heartbeat(beat)
        return wire.HeartbeatReply(unknown=unknown, superseded=superseded, ttl=registry.ttl)

    @app.get("/health")
    async def health() -> wire.Health:
        return wire.Health(
            prefill=registry.count("prefill"), decode=registry.count("decode"), ttl=registry.ttl
        )

    return app


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _invalid_request(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return error_response(400, f"the body is not JSON: {first['ctx']['error']}")
    # The first part says where it was: body or query.
    where, *path = map(str, first["loc"])
    field = ".".join(path) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    return error_response(422, f"{field or where}: {message}", field)


async def _registry_full(_request: Request, error: Exception) -> Response:
    return error_response(503, str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(error.status_code, text, headers=dict(error.headers or {}))
