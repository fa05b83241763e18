"""A twin on a real port inside the test's own loop, and a client for it."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import uvicorn

from ctxgate.inference.prompts import PromptRenderer
from ctxgate.inference.twin_profile import PROFILES
from ctxgate.inference.twin_server import TwinServer, TwinSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

INSTANT: Final = PROFILES["fast"].scaled(0)
# The first token comes at once, the second never does: what is running stays running.
STUCK: Final = replace(INSTANT, step_s=3600.0)
SETTINGS: Final = TwinSettings(profile=INSTANT, max_model_len=4096)
RENDERER: Final = PromptRenderer()  # loads its files once for all tests
HELLO: Final = [{"role": "user", "content": "hello there"}]
CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
USAGE: Final = {"stream": True, "stream_options": {"include_usage": True}}


def chat(**more: Any) -> dict[str, Any]:
    """A chat body of five tokens."""
    return {"model": "tiny", "messages": HELLO, "max_tokens": 5, "ignore_eos": True} | more


def text(prompt: Any = "hello", **more: Any) -> dict[str, Any]:
    """A completion body of five tokens."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": 5, "ignore_eos": True} | more


@dataclass
class Client:
    """What a test sees of a serving twin."""

    url: str
    server: TwinServer
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any, request_id: str | None = None) -> tuple[int, Any]:
        """Status and decoded body; JSON where there is any."""
        headers = {} if request_id is None else {"x-request-id": request_id}
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else None

    async def ok(self, path: str, body: Any, request_id: str | None = None) -> Any:
        """The body of an answer that must be 200."""
        status, answer = await self.post(path, body, request_id)
        assert status == 200, answer
        return answer

    async def stream(self, path: str, body: Any, request_id: str | None = None) -> list[Any]:
        """All events of a stream, which must end with the end mark."""
        async with self.open(path, body, request_id) as answer:
            return await rest(answer)

    @asynccontextmanager
    async def open(
        self, path: str, body: Any, request_id: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A stream under way."""
        headers = {} if request_id is None else {"x-request-id": request_id}
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            yield answer

    async def get(self, path: str) -> str:
        """The text of an answer that must be 200."""
        async with self.session.get(self.url + path) as answer:
            assert answer.status == 200
            return await answer.text()

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = (await self.get("/metrics")).splitlines()
        rows = [line for line in lines if line.startswith((f"vllm:{name}{{", f"vllm:{name} "))]
        assert rows, name
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    async def until(self, running: int, waiting: int) -> None:
        """Read the gauges until they say so."""
        seen = (-1.0, -1.0)
        async with asyncio.timeout(10):
            while seen != (running, waiting):
                seen = await self.metric("num_requests_running"), await self.metric("num_requests_waiting")


async def event(answer: aiohttp.ClientResponse) -> Any:
    """The next event of a stream; the text of the end mark."""
    line = (await answer.content.readline()).decode()
    assert line.startswith("data: "), line
    assert await answer.content.readline() == b"\n"
    data = line.removeprefix("data: ").strip()
    return data if data == "[DONE]" else json.loads(data)


async def rest(answer: aiohttp.ClientResponse) -> list[Any]:
    """The events until the end mark, which must be the last thing sent."""
    events: list[Any] = []
    while (data := await event(answer)) != "[DONE]":
        events.append(data)
    assert await answer.content.read() == b""
    return events


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Client]:
    """Serve a twin with these settings until the block ends."""
    twin = TwinServer(replace(SETTINGS, **settings), RENDERER)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(twin.app(), log_level="error")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(f"http://127.0.0.1:{listener.getsockname()[1]}", twin, session)
    finally:
        # The server's own shutdown waits a fixed time for each test; nothing is in flight here.
        for acceptor in server.servers:
            acceptor.close()
        await server.lifespan.shutdown()
