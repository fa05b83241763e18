"""An engine that refuses a prompt whose answer would not fit behind it; a token is four bytes of JSON."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.test_utils import TestServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_ROLES = ("system", "developer", "user", "assistant", "tool")


def tokens_of(messages: list[dict[str, Any]]) -> int:
    """What the engine counts for a prompt."""
    return len(json.dumps(messages)) // 4


class StrictEngine:
    """`asked`: the messages of each chat request and the status of its answer.

    `in_stream`: a stream's refusal comes as its first event, behind a status of 200. `breaks`: streams end
    before their first event; none comes before `speaks` is set. `counted`: how often it was asked to count,
    which it does while `counts`, and else never answers. `truncates`: it counts no further than a prompt may
    go.
    """

    def __init__(self, window: int, *, in_stream: bool = False, counts: bool = True) -> None:
        self.url = ""
        self.window = window
        self.in_stream = in_stream
        self.breaks = False
        self.truncates = False
        self.counts = counts
        self.counted = 0
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.asked: list[tuple[list[dict[str, Any]], int]] = []

    @property
    def statuses(self) -> list[int]:
        """Of all answers, in order."""
        return [status for _, status in self.asked]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        refusal, stream = self._refusal(body), body.get("stream", False)
        self.asked.append((body["messages"], 200 if refusal is None else 400))
        if refusal is not None:
            error = {"error": {"message": refusal, "type": "BadRequestError", "param": None, "code": 400}}
            if stream and self.in_stream:
                return await self._streamed(request, f"data: {json.dumps(error)}\n\n")
            return web.json_response(error, status=400)
        if stream and self.breaks:
            return await self._streamed(request, "")
        prompt = tokens_of(body["messages"])
        usage = {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1}
        if not stream:
            message = {"role": "assistant", "content": "ok"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})
        first = {"choices": [{"index": 0, "delta": {"content": "ok"}, "finish_reason": "stop"}]}
        text = f"data: {json.dumps(first)}\n\n" + f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        return await self._streamed(request, text + "data: [DONE]\n\n")

    async def _streamed(self, request: web.Request, text: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await self.speaks.wait()
        if text:
            await response.write(text.encode())
        return response

    def _refusal(self, body: dict[str, Any]) -> str | None:
        for message in body["messages"]:
            if message["role"] not in _ROLES:
                return f"1 validation error: {{'loc': 'role', 'input': {message['role']!r}}}"
        prompt, output = tokens_of(body["messages"]), body.get("max_tokens", 1)
        if prompt + output <= self.window:
            return None
        counted = str(prompt)
        if self.truncates:
            counted = f"at least {max(self.window - output, 0) + 1}"
        return (
            f"This model's maximum context length is {self.window} tokens. However, you requested {output} "
            f"output tokens and your prompt contains {counted} input tokens, for a total of more."
        )

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": self.window}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        self.counted += 1
        if not self.counts:
            await asyncio.Event().wait()
        return web.json_response({"count": tokens_of((await request.json())["messages"])})


async def _well(_: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def serving(engine: StrictEngine) -> AsyncIterator[StrictEngine]:
    """Serve it at its `url` until the block ends."""
    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/chat/completions", engine.chat)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/tokenize", engine.tokenize)
    app.router.add_get("/health", _well)
    async with TestServer(app) as server:
        engine.url = str(server.make_url("")).rstrip("/")
        yield engine
