"""A server in front of an engine that remembers the chat requests that pass."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_CHAT = "/v1/chat/completions"


@dataclass
class Recorder:
    """`url` is the root to send to. `asked`: the bodies of chat requests, with each answer's status."""

    url: str
    asked: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def answered(self) -> list[list[dict[str, Any]]]:
        """The messages of each request that was answered, in order."""
        return [body["messages"] for body, status in self.asked if status == 200]


@asynccontextmanager
async def recording(engine: str) -> AsyncIterator[Recorder]:
    """Pass requests on to the engine at a root URL until the block ends. Answers are read whole."""
    found = Recorder("")

    async def passed(request: web.Request) -> web.Response:
        raw = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        found.paths.append(request.path)
        async with session.request(
            request.method, engine + request.path_qs, data=raw, headers=headers
        ) as answer:
            body = await answer.read()
            if request.path == _CHAT:
                found.asked.append((json.loads(raw), answer.status))
            kind = {"content-type": answer.headers.get("content-type", "application/json")}
            return web.Response(body=body, status=answer.status, headers=kind)

    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", passed)
    async with aiohttp.ClientSession(auto_decompress=False) as session, TestServer(app) as server:
        found.url = str(server.make_url("")).rstrip("/")
        yield found
