"""A chat server whose answers a test writes, for clients under test."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from ctxgate.gateway.replay_client import Backend

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def usage(prompt: int, cached: int | None, output: int, **more: object) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    total = prompt + output
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": total,
        "prompt_tokens_details": details,
    } | more


def events(*data: object, done: bool = True) -> bytes:
    text = "".join(f"data: {json.dumps(each)}\n\n" for each in data)
    return (text + ("data: [DONE]\n\n" if done else "")).encode()


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


async def answer(request: web.Request, raw: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(raw)
    return response


async def plain(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """10 prompt tokens per message, all but the last 10 of them cached; 2 tokens out."""
    prompt = 10 * len(body["messages"])
    record = usage(prompt, prompt - 10, 2)
    if not body["stream"]:
        return web.json_response({"choices": [], "usage": record})
    parts = chunk({"role": "assistant", "content": ""}), chunk({"content": "x"}), chunk({}, "length")
    return await answer(request, events(*parts, {"choices": [], "usage": record}))


class Server:
    """Remembers what it was asked; `handler` writes the answers."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.ledger: list[list[dict[str, Any]]] = []
        self.metrics = ""
        self.models: object = {"data": [{"id": "m", "max_model_len": 2048}, {"id": "n"}]}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((body, dict(request.headers)))
        return await self.handler(request, body)

    async def usage(self, request: web.Request) -> web.Response:
        assert request.query["by"] == "task"
        start, limit = int(request.query["offset"]), int(request.query["limit"])
        if not self.ledger:
            raise web.HTTPNotFound
        rows = self.ledger.pop(0) if len(self.ledger) > 1 else self.ledger[0]
        following = start + limit if len(rows) > start + limit else None
        return web.json_response({"by": "task", "rows": rows[start : start + limit], "next": following})

    def app(self) -> web.Application:
        async def models(_: web.Request) -> web.Response:
            return web.json_response(self.models)

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=self.metrics)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/usage", self.usage)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/metrics", metrics)
        return app


@asynccontextmanager
async def running(handler: Handler = plain) -> AsyncIterator[tuple[Server, Backend]]:
    server = Server(handler)
    async with (
        TestServer(server.app()) as running_server,
        Backend(str(running_server.make_url("/v1/")), "sk-1") as backend,
    ):
        yield server, backend
