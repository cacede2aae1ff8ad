"""The sequential style of disaggregation: P first, then D with what P answered. For tests and demos.

P is asked with ``kv_transfer_params = {"do_remote_decode": true}``; the ``kv_transfer_params`` of its answer go to D,
whose answer goes to the client. vLLM's example proxies, vllm-router and llm-d do the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from starlette.background import BackgroundTask
from starlette.responses import Response, StreamingResponse


def make_app(prefill_url: str, decode_url: str) -> FastAPI:
    """The proxy in front of one prefill and one decode server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=None) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def forward(request: Request) -> Response:
        client: httpx.AsyncClient = app.state.client
        body: dict[str, Any] = await request.json()
        prefilled = await client.post(prefill_url + request.url.path, json=_for_prefill(body))
        if prefilled.is_error:
            media_type = prefilled.headers.get("content-type")
            return Response(prefilled.content, prefilled.status_code, media_type=media_type)
        body["kv_transfer_params"] = prefilled.json()["kv_transfer_params"]
        decoding = client.build_request("POST", decode_url + request.url.path, content=json.dumps(body))
        decoding.headers["content-type"] = "application/json"
        answer = await client.send(decoding, stream=True)
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            media_type=answer.headers["content-type"],
            background=BackgroundTask(answer.aclose),
        )

    return app


def _for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """What P is asked: one token, in one piece, and to keep the KV cache for D."""
    asked = {name: value for name, value in body.items() if name not in ("stream_options", "min_tokens")}
    asked.update({name: 1 for name in ("max_tokens", "max_completion_tokens") if name in body}, stream=False)
    asked.setdefault("max_tokens", 1)
    return {**asked, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks P first, then D with what P answered.")
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    uvicorn.run(make_app(args.prefill, args.decode), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
